//! Containers: configuration, limits, status.

use super::*;

base::messages! {
    enum MountPropagation { Private = 0; HostToContainer = 1; Bidirectional = 2; }

    message Mount {
        string container_path = 1;
        string host_path = 2;
        bool readonly = 3;
        bool selinux_relabel = 4;
        enum MountPropagation propagation = 5;
        repeated IDMapping uid_mappings = 6;
        repeated IDMapping gid_mappings = 7;
        bool recursive_read_only = 8;
        ImageSpec image = 9;
        string image_sub_path = 10;
    }

    message KeyValue {
        string key = 1;
        bytes value = 2;
    }

    message LinuxContainerResources {
        int64 cpu_period = 1;
        int64 cpu_quota = 2;
        int64 cpu_shares = 3;
        int64 memory_limit_in_bytes = 4;
        int64 oom_score_adj = 5;
        string cpuset_cpus = 6;
        string cpuset_mems = 7;
        repeated HugepageLimit hugepage_limits = 8;
        map<string, string> unified = 9;
        int64 memory_swap_limit_in_bytes = 10;
    }

    message HugepageLimit {
        string page_size = 1;
        uint64 limit = 2;
    }

    message Capability {
        repeated string add_capabilities = 1;
        repeated string drop_capabilities = 2;
        repeated string add_ambient_capabilities = 3;
    }

    message LinuxContainerSecurityContext {
        Capability capabilities = 1;
        bool privileged = 2;
        NamespaceOption namespace_options = 3;
        SELinuxOption selinux_options = 4;
        Int64Value run_as_user = 5;
        Int64Value run_as_group = 12;
        string run_as_username = 6;
        bool readonly_rootfs = 7;
        repeated int64 supplemental_groups = 8;
        enum SupplementalGroupsPolicy supplemental_groups_policy = 17;
        bool no_new_privs = 11;
        repeated string masked_paths = 13;
        repeated string readonly_paths = 14;
        SecurityProfile seccomp = 15;
        SecurityProfile apparmor = 16;
    }

    message LinuxContainerConfig {
        LinuxContainerResources resources = 1;
        LinuxContainerSecurityContext security_context = 2;
    }

    message LinuxContainerUser {
        int64 uid = 1;
        int64 gid = 2;
        repeated int64 supplemental_groups = 3;
    }

    message ContainerMetadata {
        string name = 1;
        uint32 attempt = 2;
    }

    message Device {
        string container_path = 1;
        string host_path = 2;
        string permissions = 3;
    }

    message CDIDevice {
        string name = 1;
    }

    message ContainerConfig {
        ContainerMetadata metadata = 1;
        ImageSpec image = 2;
        repeated string command = 3;
        repeated string args = 4;
        string working_dir = 5;
        repeated KeyValue envs = 6;
        repeated Mount mounts = 7;
        repeated Device devices = 8;
        map<string, string> labels = 9;
        map<string, string> annotations = 10;
        string log_path = 11;
        bool stdin = 12;
        bool stdin_once = 13;
        bool tty = 14;
        LinuxContainerConfig linux = 15;
        repeated CDIDevice cdi_devices = 17;
        enum Signal stop_signal = 18;
    }

    enum Signal {
        RuntimeDefault = 0; Sigabrt = 1; Sigalrm = 2; Sigbus = 3; Sigchld = 4; Sigcld = 5;
        Sigcont = 6; Sigfpe = 7; Sighup = 8; Sigill = 9; Sigint = 10; Sigio = 11; Sigiot = 12;
        Sigkill = 13; Sigpipe = 14; Sigpoll = 15; Sigprof = 16; Sigpwr = 17; Sigquit = 18;
        Sigsegv = 19; Sigstkflt = 20; Sigstop = 21; Sigsys = 22; Sigterm = 23; Sigtrap = 24;
        Sigtstp = 25; Sigttin = 26; Sigttou = 27; Sigurg = 28; Sigusr1 = 29; Sigusr2 = 30;
        Sigvtalrm = 31; Sigwinch = 32; Sigxcpu = 33; Sigxfsz = 34; Sigrtmin = 35;
        Sigrtminplus1 = 36; Sigrtminplus2 = 37; Sigrtminplus3 = 38; Sigrtminplus4 = 39;
        Sigrtminplus5 = 40; Sigrtminplus6 = 41; Sigrtminplus7 = 42; Sigrtminplus8 = 43;
        Sigrtminplus9 = 44; Sigrtminplus10 = 45; Sigrtminplus11 = 46; Sigrtminplus12 = 47;
        Sigrtminplus13 = 48; Sigrtminplus14 = 49; Sigrtminplus15 = 50; Sigrtmaxminus14 = 51;
        Sigrtmaxminus13 = 52; Sigrtmaxminus12 = 53; Sigrtmaxminus11 = 54; Sigrtmaxminus10 = 55;
        Sigrtmaxminus9 = 56; Sigrtmaxminus8 = 57; Sigrtmaxminus7 = 58; Sigrtmaxminus6 = 59;
        Sigrtmaxminus5 = 60; Sigrtmaxminus4 = 61; Sigrtmaxminus3 = 62; Sigrtmaxminus2 = 63;
        Sigrtmaxminus1 = 64; Sigrtmax = 65;
    }

    message CreateContainerRequest {
        string pod_sandbox_id = 1;
        ContainerConfig config = 2;
        PodSandboxConfig sandbox_config = 3;
    }

    message CreateContainerResponse {
        string container_id = 1;
    }

    message StartContainerRequest {
        string container_id = 1;
    }

    message StopContainerRequest {
        string container_id = 1;
        int64 timeout = 2;
    }

    message RemoveContainerRequest {
        string container_id = 1;
    }

    enum ContainerState { Created = 0; Running = 1; Exited = 2; Unknown = 3; }

    message ContainerStateValue {
        enum ContainerState state = 1;
    }

    message ContainerFilter {
        string id = 1;
        ContainerStateValue state = 2;
        string pod_sandbox_id = 3;
        map<string, string> label_selector = 4;
    }

    message ListContainersRequest {
        ContainerFilter filter = 1;
    }

    message Container {
        string id = 1;
        string pod_sandbox_id = 2;
        ContainerMetadata metadata = 3;
        ImageSpec image = 4;
        string image_ref = 5;
        enum ContainerState state = 6;
        int64 created_at = 7;
        map<string, string> labels = 8;
        map<string, string> annotations = 9;
        string image_id = 10;
    }

    message ListContainersResponse {
        repeated Container containers = 1;
    }

    message ContainerStatusRequest {
        string container_id = 1;
        bool verbose = 2;
    }

    message ContainerStatus {
        string id = 1;
        ContainerMetadata metadata = 2;
        enum ContainerState state = 3;
        int64 created_at = 4;
        int64 started_at = 5;
        int64 finished_at = 6;
        int32 exit_code = 7;
        ImageSpec image = 8;
        string image_ref = 9;
        string reason = 10;
        string message = 11;
        map<string, string> labels = 12;
        map<string, string> annotations = 13;
        repeated Mount mounts = 14;
        string log_path = 15;
        ContainerResources resources = 16;
        string image_id = 17;
        ContainerUser user = 18;
        enum Signal stop_signal = 19;
    }

    message ContainerStatusResponse {
        ContainerStatus status = 1;
        map<string, string> info = 2;
    }

    message ContainerResources {
        LinuxContainerResources linux = 1;
    }

    message ContainerUser {
        LinuxContainerUser linux = 1;
    }

    message UpdateContainerResourcesRequest {
        string container_id = 1;
        LinuxContainerResources linux = 2;
        map<string, string> annotations = 4;
    }

    message ExecSyncRequest {
        string container_id = 1;
        repeated string cmd = 2;
        int64 timeout = 3;
    }

    message ExecSyncResponse {
        bytes stdout = 1;
        bytes stderr = 2;
        int32 exit_code = 3;
    }

    message ExecRequest {
        string container_id = 1;
        repeated string cmd = 2;
        bool tty = 3;
        bool stdin = 4;
        bool stdout = 5;
        bool stderr = 6;
    }

    message ExecResponse {
        string url = 1;
    }

    message AttachRequest {
        string container_id = 1;
        bool stdin = 2;
        bool tty = 3;
        bool stdout = 4;
        bool stderr = 5;
    }

    message AttachResponse {
        string url = 1;
    }

    message ContainerAttributes {
        string id = 1;
        ContainerMetadata metadata = 2;
        map<string, string> labels = 3;
        map<string, string> annotations = 4;
    }

    message ReopenContainerLogRequest {
        string container_id = 1;
    }
}
