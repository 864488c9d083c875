//! Errors that callers can act on. The names are gRPC's codes, as far as runtimes use them.

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No such sandbox, container or image: often as good as success.
    #[error("{0}")]
    NotFound(String),
    #[error("{0}")]
    AlreadyExists(String),
    /// A retry does not help.
    #[error("{0}")]
    InvalidArgument(String),
    /// The object exists, but is not in the required state (exec in a stopped container).
    #[error("{0}")]
    FailedPrecondition(String),
    /// The runtime or a registry is unreachable; a retry may help.
    #[error("{0}")]
    Unavailable(String),
    /// A registry or the kernel refused.
    #[error("{0}")]
    PermissionDenied(String),
    #[error("{0}")]
    DeadlineExceeded(String),
    #[error("{0}")]
    ResourceExhausted(String),
    #[error("{0}")]
    Unimplemented(String),
    #[error("{0}")]
    Internal(String),
}

impl Error {
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound(_))
    }

    /// gRPC's name of the code, as upstream prints it (`rpc error: code = NotFound desc = …`).
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotFound(_) => "NotFound",
            Self::AlreadyExists(_) => "AlreadyExists",
            Self::InvalidArgument(_) => "InvalidArgument",
            Self::FailedPrecondition(_) => "FailedPrecondition",
            Self::Unavailable(_) => "Unavailable",
            Self::PermissionDenied(_) => "PermissionDenied",
            Self::DeadlineExceeded(_) => "DeadlineExceeded",
            Self::ResourceExhausted(_) => "ResourceExhausted",
            Self::Unimplemented(_) => "Unimplemented",
            Self::Internal(_) => "Unknown",
        }
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::Internal(error.to_string())
    }
}
