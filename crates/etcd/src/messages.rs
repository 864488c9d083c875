//! The messages of etcd's v3 API. Field numbers are etcd's; unused fields are absent (decoding skips
//! them). Messages that only a server needs are in [`crate::server::messages`].

use bytes::Bytes;
use prost::Oneof;

base::messages! {
    message ResponseHeader {
        uint64 cluster_id = 1;
        uint64 member_id = 2;
        uint64 raft_term = 4;
        int64 revision = 3;
    }

    message KeyValue {
        bytes key = 1;
        int64 create_revision = 2;
        int64 mod_revision = 3;
        int64 version = 4;
        bytes value = 5;
        int64 lease = 6;
    }

    message RangeRequest {
        bytes key = 1;
        bytes range_end = 2;
        int64 limit = 3;
        int64 revision = 4;
        enum SortOrder sort_order = 5;
        enum SortTarget sort_target = 6;
        bool keys_only = 8;
        bool count_only = 9;
        int64 min_mod_revision = 10;
        int64 max_mod_revision = 11;
        int64 min_create_revision = 12;
        int64 max_create_revision = 13;
    }

    enum SortOrder { None = 0; Ascend = 1; Descend = 2; }

    enum SortTarget { Key = 0; Version = 1; Create = 2; Mod = 3; Value = 4; }

    message RangeResponse {
        ResponseHeader header = 1;
        repeated KeyValue kvs = 2;
        bool more = 3;
        int64 count = 4;
    }

    message PutRequest {
        bytes key = 1;
        bytes value = 2;
        int64 lease = 3;
        bool prev_kv = 4;
        bool ignore_value = 5;
        bool ignore_lease = 6;
    }

    message PutResponse {
        ResponseHeader header = 1;
        KeyValue prev_kv = 2;
    }

    message DeleteRangeRequest {
        bytes key = 1;
        bytes range_end = 2;
        bool prev_kv = 3;
    }

    message DeleteRangeResponse {
        ResponseHeader header = 1;
        int64 deleted = 2;
        repeated KeyValue prev_kvs = 3;
    }

    enum CompareTarget { Version = 0; Create = 1; Mod = 2; Value = 3; Lease = 4; }

    enum CompareResult { Equal = 0; Greater = 1; Less = 2; NotEqual = 3; }

    message Compare {
        enum CompareResult result = 1;
        enum CompareTarget target = 2;
        bytes key = 3;
        oneof(4, 5, 6, 7, 8) CompareWith with;
        bytes range_end = 64;
    }
}

#[derive(Clone, PartialEq, Oneof)]
pub enum CompareWith {
    #[prost(int64, tag = "4")]
    Version(i64),
    #[prost(int64, tag = "5")]
    CreateRevision(i64),
    #[prost(int64, tag = "6")]
    ModRevision(i64),
    #[prost(bytes = "bytes", tag = "7")]
    Value(Bytes),
    #[prost(int64, tag = "8")]
    Lease(i64),
}

base::messages! {
    message RequestOp {
        oneof(1, 2, 3, 4) Request request;
    }

    oneof Request {
        RangeRequest Range = 1;
        PutRequest Put = 2;
        DeleteRangeRequest DeleteRange = 3;
        TxnRequest Txn = 4;
    }

    message ResponseOp {
        oneof(1, 2, 3) Response response;
    }

    oneof Response {
        RangeResponse Range = 1;
        PutResponse Put = 2;
        DeleteRangeResponse DeleteRange = 3;
    }

    message TxnRequest {
        repeated Compare compare = 1;
        repeated RequestOp success = 2;
        repeated RequestOp failure = 3;
    }

    message TxnResponse {
        ResponseHeader header = 1;
        bool succeeded = 2;
        repeated ResponseOp responses = 3;
    }

    message CompactionRequest {
        int64 revision = 1;
    }

    message CompactionResponse {
        ResponseHeader header = 1;
    }

    message LeaseGrantRequest {
        int64 ttl = 1;
        int64 id = 2;
    }

    message LeaseGrantResponse {
        ResponseHeader header = 1;
        int64 id = 2;
        int64 ttl = 3;
    }

    /// The request of a revocation and of a keep-alive.
    message LeaseRequest {
        int64 id = 1;
    }

    message LeaseRevokeResponse {
        ResponseHeader header = 1;
    }

    message LeaseKeepAliveResponse {
        ResponseHeader header = 1;
        int64 id = 2;
        /// 0: there is no such lease.
        int64 ttl = 3;
    }

    message WatchRequest {
        oneof(1, 2, 3) WatchCall call;
    }

    oneof WatchCall {
        WatchCreateRequest Create = 1;
        WatchCancelRequest Cancel = 2;
        WatchProgressRequest Progress = 3;
    }

    message WatchCreateRequest {
        bytes key = 1;
        bytes range_end = 2;
        int64 start_revision = 3;
        bool progress_notify = 4;
        repeated enum EventType filters = 5;
        bool prev_kv = 6;
        int64 watch_id = 7;
    }

    message WatchCancelRequest {
        int64 watch_id = 1;
    }

    message WatchProgressRequest {}

    message WatchResponse {
        ResponseHeader header = 1;
        int64 watch_id = 2;
        bool created = 3;
        bool canceled = 4;
        int64 compact_revision = 5;
        string cancel_reason = 6;
        repeated Event events = 11;
    }

    enum EventType { Put = 0; Delete = 1; }

    message Event {
        enum EventType r#type = 1;
        KeyValue kv = 2;
        KeyValue prev_kv = 3;
    }

    message LeaseTimeToLiveRequest {
        int64 id = 1;
        bool keys = 2;
    }

    message LeaseTimeToLiveResponse {
        ResponseHeader header = 1;
        int64 id = 2;
        /// -1: there is no such lease.
        int64 ttl = 3;
        int64 granted_ttl = 4;
        repeated bytes keys = 5;
    }

    /// A request without fields.
    message Empty {}

    message LeaseLeasesResponse {
        ResponseHeader header = 1;
        repeated LeaseRequest leases = 2;
    }

    message StatusResponse {
        ResponseHeader header = 1;
        string version = 2;
        int64 db_size = 3;
        uint64 leader = 4;
        uint64 raft_index = 5;
        uint64 raft_term = 6;
        uint64 raft_applied_index = 7;
        repeated string errors = 8;
        int64 db_size_in_use = 9;
        bool is_learner = 10;
        string storage_version = 11;
        int64 db_size_quota = 12;
        /// From here on the fields are ours, about the backend of a served store; etcd's clients skip them.
        string backend = 1000;
        repeated uint64 commits = 1001;
        double commit_seconds = 1002;
    }

    message SnapshotResponse {
        ResponseHeader header = 1;
        uint64 remaining_bytes = 2;
        bytes blob = 3;
        string version = 4;
    }

    /// Ours, not etcd's: the revision at a time.
    message RevisionAtRequest {
        uint64 millis = 1;
    }

    message RevisionAtResponse {
        ResponseHeader header = 1;
        int64 revision = 2;
    }
}
