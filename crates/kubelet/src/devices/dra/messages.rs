//! The messages of DRA's kubelet plugin API, v1; those of v1beta1 are equal.

base::messages! {
    message Claim {
        string namespace = 1;
        string uid = 2;
        string name = 3;
    }

    /// The request of both calls.
    message Request {
        repeated Claim claims = 1;
    }

    /// By the claims' uids.
    message PrepareAnswer {
        map<string, Prepared> claims = 1;
    }

    message Prepared {
        repeated Device devices = 1;
        string error = 2;
    }

    message Device {
        repeated string request_names = 1;
        string pool_name = 2;
        string device_name = 3;
        repeated string cdi_device_ids = 4;
        optional string share_id = 5;
    }

    message UnprepareAnswer {
        map<string, Unprepared> claims = 1;
    }

    message Unprepared {
        string error = 1;
    }
}
