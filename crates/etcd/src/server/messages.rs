//! The messages of etcd's v3 API that only a server needs. Field numbers are etcd's.

pub use crate::messages::*;

base::messages! {
    enum AlarmAction { Get = 0; Activate = 1; Deactivate = 2; }

    enum AlarmType { None = 0; NoSpace = 1; Corrupt = 2; }

    message AlarmRequest {
        enum AlarmAction action = 1;
        uint64 member_id = 2;
        enum AlarmType alarm = 3;
    }

    message AlarmMember {
        uint64 member_id = 1;
        enum AlarmType alarm = 2;
    }

    message AlarmResponse {
        ResponseHeader header = 1;
        repeated AlarmMember alarms = 2;
    }

    /// The answer to defragmentation.
    message HeaderResponse {
        ResponseHeader header = 1;
    }

    message HashKvRequest {
        int64 revision = 1;
    }

    message HashKvResponse {
        ResponseHeader header = 1;
        uint32 hash = 2;
        int64 compact_revision = 3;
        int64 hash_revision = 4;
    }

    message Member {
        uint64 id = 1;
        string name = 2;
        repeated string peer_urls = 3;
        repeated string client_urls = 4;
    }

    message MemberListResponse {
        ResponseHeader header = 1;
        repeated Member members = 2;
    }

    message AuthStatusResponse {
        ResponseHeader header = 1;
        bool enabled = 2;
    }

    /// gRPC's own health service; 1 is "serving".
    message HealthCheckResponse {
        int32 status = 1;
    }
}
