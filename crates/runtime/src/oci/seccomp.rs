//! The system calls that a container may make.
//!
//! `RuntimeDefault` is a default-deny table with the effect of the common runtimes' default
//! profile. Calls that programs need are allowed, all others return EPERM; a capability allows more
//! calls. A user's own profile (`Localhost`) is a file in the same format.
//!
//! Invariant: it fails closed. An unreadable or invalid profile is an error, never "no filter".

use std::collections::BTreeSet;
use std::path::Path;

use cri::{Error, ProfileType, Result, SecurityProfile};
use libcontainer::oci_spec::runtime::LinuxSeccomp;
use serde_json::{Value, json};

const EPERM: u32 = 1;
const ENOSYS: u32 = 38;

/// Flags of clone that create namespaces. CLONE_NEWTIME is missing: it shares its bit with the signal.
const NEW_NAMESPACES: u64 = 0x7e02_0000;
const AF_VSOCK: u64 = 40;

const ALWAYS: &str = "
accept accept4 access adjtimex alarm bind brk cachestat capget capset chdir chmod chown chown32
clock_adjtime clock_adjtime64 clock_getres clock_getres_time64 clock_gettime clock_gettime64
clock_nanosleep clock_nanosleep_time64 close close_range connect copy_file_range creat dup dup2 dup3
epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait
epoll_wait_old eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64
fadvise64_64 fallocate fanotify_mark fchdir fchmod fchmodat fchmodat2 fchown fchown32 fchownat fcntl
fcntl64 fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat fstat64 fstatat64
fstatfs fstatfs64 fsync ftruncate ftruncate64 futex futex_requeue futex_time64 futex_wait
futex_waitv futex_wake futimesat getcpu getcwd getdents getdents64 getegid getegid32 geteuid
geteuid32 getgid getgid32 getgroups getgroups32 getitimer getpeername getpgid getpgrp getpid getppid
getpriority getrandom getresgid getresgid32 getresuid getresuid32 getrlimit get_robust_list
getrusage getsid getsockname getsockopt get_thread_area gettid gettimeofday getuid getuid32
getxattr getxattrat inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel ioctl
io_destroy io_getevents io_pgetevents io_pgetevents_time64 ioprio_get ioprio_set io_setup io_submit
ipc kill landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown lchown32 lgetxattr
link linkat listen listmount listxattr listxattrat llistxattr _llseek lremovexattr lseek lsetxattr
lstat lstat64 madvise map_shadow_stack membarrier memfd_create memfd_secret mincore mkdir mkdirat
mknod mknodat mlock mlock2 mlockall mmap mmap2 mprotect mq_getsetattr mq_notify mq_open
mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 mq_unlink mremap mseal
msgctl msgget msgrcv msgsnd msync munlock munlockall munmap name_to_handle_at nanosleep newfstatat
_newselect open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free
pkey_mprotect poll ppoll ppoll_time64 prctl pread64 preadv preadv2 prlimit64 process_mrelease
pselect6 pselect6_time64 ptrace pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv
recv recvfrom recvmmsg recvmmsg_time64 recvmsg remap_file_pages removexattr removexattrat rename
renameat renameat2 restart_syscall riscv_hwprobe rmdir rseq rt_sigaction rt_sigpending
rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64
rt_tgsigqueueinfo sched_getaffinity sched_getattr sched_getparam sched_get_priority_max
sched_get_priority_min sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64
sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl
semget semop semtimedop semtimedop_time64 send sendfile sendfile64 sendmmsg sendmsg sendto setfsgid
setfsgid32 setfsuid setfsuid32 setgid setgid32 setgroups setgroups32 setitimer setpgid setpriority
setregid setregid32 setresgid setresgid32 setresuid setresuid32 setreuid setreuid32 setrlimit
set_robust_list setsid setsockopt set_thread_area set_tid_address setuid setuid32 setxattr
setxattrat shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 sigprocmask sigreturn
socketcall socketpair splice stat stat64 statfs statfs64 statmount statx symlink symlinkat sync
sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun
timer_gettime timer_gettime64 timer_settime timer_settime64 timerfd_create timerfd_gettime
timerfd_gettime64 timerfd_settime timerfd_settime64 times tkill truncate truncate64 ugetrlimit umask
uname unlink unlinkat uretprobe utime utimensat utimensat_time64 utimes vfork vmsplice wait4 waitid
waitpid write writev arch_prctl modify_ldt process_vm_readv process_vm_writev
arm_fadvise64_64 arm_sync_file_range sync_file_range2 breakpoint cacheflush set_tls
";

/// Capability → the system calls that it allows.
const WITH_CAPABILITY: &[(&str, &str)] = &[
    ("CAP_DAC_READ_SEARCH", "open_by_handle_at"),
    (
        "CAP_SYS_ADMIN",
        "bpf clone clone3 fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie lsm_get_self_attr
         lsm_list_modules lsm_set_self_attr mount mount_setattr move_mount open_tree open_tree_attr
         perf_event_open quotactl quotactl_fd setdomainname sethostname setns syslog umount umount2
         unshare",
    ),
    ("CAP_SYS_BOOT", "reboot"),
    ("CAP_SYS_CHROOT", "chroot"),
    ("CAP_SYS_MODULE", "delete_module init_module finit_module"),
    ("CAP_SYS_PACCT", "acct"),
    ("CAP_SYS_PTRACE", "kcmp pidfd_getfd process_madvise"),
    ("CAP_SYS_RAWIO", "iopl ioperm"),
    ("CAP_SYS_TIME", "settimeofday stime clock_settime clock_settime64"),
    ("CAP_SYS_TTY_CONFIG", "vhangup"),
    ("CAP_SYS_NICE", "get_mempolicy mbind set_mempolicy set_mempolicy_home_node"),
    ("CAP_SYSLOG", "syslog"),
    ("CAP_BPF", "bpf"),
    ("CAP_PERFMON", "perf_event_open"),
];

/// The `linux.seccomp` section, or `None` for a container without a filter. As in CRI, a missing
/// profile means unconfined.
pub(crate) fn section(
    profile: Option<&SecurityProfile>,
    privileged: bool,
    capabilities: &BTreeSet<String>,
) -> Result<Option<Value>> {
    let Some(profile) = profile.filter(|_| !privileged) else { return Ok(None) };
    match ProfileType::try_from(profile.profile_type) {
        Ok(ProfileType::Unconfined) => Ok(None),
        Ok(ProfileType::RuntimeDefault) => Ok(Some(runtime_default(capabilities))),
        Ok(ProfileType::Localhost) => localhost(&profile.localhost_ref).map(Some),
        Err(_) => Err(Error::InvalidArgument(format!(
            "unknown seccomp profile type {}",
            profile.profile_type
        ))),
    }
}

fn runtime_default(capabilities: &BTreeSet<String>) -> Value {
    let names = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let allow = |names: Vec<String>| json!({"names": names, "action": "SCMP_ACT_ALLOW"});
    let allow_if = |name: &str, index: u32, value: u64, two: u64, op: &str| {
        json!({"names": [name], "action": "SCMP_ACT_ALLOW",
               "args": [{"index": index, "value": value, "valueTwo": two, "op": op}]})
    };
    let mut rules = vec![allow(names(ALWAYS))];
    for persona in [0, 8, 0x20000, 0x20008, 0xffff_ffff] {
        rules.push(allow_if("personality", 0, persona, 0, "SCMP_CMP_EQ"));
    }
    rules.push(allow_if("socket", 0, AF_VSOCK, 0, "SCMP_CMP_NE"));
    for (capability, opens) in WITH_CAPABILITY {
        if capabilities.contains(*capability) {
            rules.push(allow(names(opens)));
        }
    }
    if !capabilities.contains("CAP_SYS_ADMIN") {
        rules.push(allow_if("clone", 0, NEW_NAMESPACES, 0, "SCMP_CMP_MASKED_EQ"));
        // The flags of clone3 are in memory, where a filter cannot look. With ENOSYS programs fall
        // back to clone.
        rules.push(json!({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}));
    }
    json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": EPERM,
        "architectures": architectures(),
        "syscalls": rules,
    })
}

fn architectures() -> &'static [&'static str] {
    match std::env::consts::ARCH {
        "x86_64" => &["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "aarch64" => &["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
        _ => &[],
    }
}

/// Reads the profile `localhost/<path>` or `<path>`.
fn localhost(reference: &str) -> Result<Value> {
    let path = Path::new(reference.strip_prefix("localhost/").unwrap_or(reference));
    let invalid = |what: String| {
        Error::InvalidArgument(format!("seccomp profile {}: {what}", path.display()))
    };
    let text = std::fs::read_to_string(path).map_err(|error| invalid(error.to_string()))?;
    let value: Value = serde_json::from_str(&text).map_err(|error| invalid(error.to_string()))?;
    // Unknown fields would be dropped silently and weaken the filter, so they are an error.
    serde_json::from_value::<LinuxSeccomp>(value.clone())
        .map_err(|error| invalid(error.to_string()))?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(capabilities: &[&str]) -> Value {
        let set = capabilities.iter().map(|c| (*c).to_owned()).collect();
        let default = SecurityProfile::default();
        section(Some(&default), false, &set).expect("valid").expect("a filter")
    }

    fn allows(section: &Value, name: &str) -> bool {
        section["syscalls"].as_array().expect("rules").iter().any(|rule| {
            rule["action"] == "SCMP_ACT_ALLOW"
                && rule.get("args").is_none()
                && rule["names"].as_array().expect("names").iter().any(|n| n == name)
        })
    }

    #[test]
    fn the_default_denies_and_capabilities_allow() {
        let plain = rules(&[]);
        assert_eq!(plain["defaultAction"], "SCMP_ACT_ERRNO");
        let check = |section: &Value, name, allowed| {
            assert_eq!(allows(section, name), allowed, "{name}");
        };
        check(&plain, "read", true);
        check(&plain, "mount", false);
        check(&plain, "unshare", false);
        check(&plain, "keyctl", false);
        check(&plain, "io_uring_setup", false);
        check(&rules(&["CAP_SYS_ADMIN"]), "mount", true);
        check(&rules(&["CAP_SYS_TIME"]), "clock_settime", true);
        serde_json::from_value::<LinuxSeccomp>(plain).expect("libcontainer reads it");
    }

    #[test]
    fn a_profile_that_cannot_be_read_is_an_error() {
        let profile = SecurityProfile {
            profile_type: ProfileType::Localhost as i32,
            localhost_ref: "/nowhere/profile.json".into(),
        };
        assert!(section(Some(&profile), false, &BTreeSet::new()).is_err());
        assert_eq!(section(Some(&profile), true, &BTreeSet::new()), Ok(None));
        let odd = SecurityProfile { profile_type: 7, ..profile };
        assert!(section(Some(&odd), false, &BTreeSet::new()).is_err());
    }
}
