//! Images: names, credentials, disk usage.

use super::*;

base::messages! {
    message ImageSpec {
        string image = 1;
        map<string, string> annotations = 2;
        string user_specified_image = 18;
        string runtime_handler = 19;
        string image_ref = 20;
    }

    message ImageFilter {
        ImageSpec image = 1;
    }

    message ListImagesRequest {
        ImageFilter filter = 1;
    }

    message Image {
        string id = 1;
        repeated string repo_tags = 2;
        repeated string repo_digests = 3;
        uint64 size = 4;
        Int64Value uid = 5;
        string username = 6;
        ImageSpec spec = 7;
        bool pinned = 8;
    }

    message ListImagesResponse {
        repeated Image images = 1;
    }

    message ImageStatusRequest {
        ImageSpec image = 1;
        bool verbose = 2;
    }

    message ImageStatusResponse {
        Image image = 1;
        map<string, string> info = 2;
    }

    #[prost(skip_debug)]
    message AuthConfig {
        string username = 1;
        string password = 2;
        string auth = 3;
        string server_address = 4;
        string identity_token = 5;
        string registry_token = 6;
    }

    message PullImageRequest {
        ImageSpec image = 1;
        AuthConfig auth = 2;
        PodSandboxConfig sandbox_config = 3;
    }

    message PullImageResponse {
        string image_ref = 1;
    }

    message RemoveImageRequest {
        ImageSpec image = 1;
    }

    message ImageFsInfoRequest {}

    message ImageFsInfoResponse {
        repeated FilesystemUsage image_filesystems = 1;
        repeated FilesystemUsage container_filesystems = 2;
    }
}
