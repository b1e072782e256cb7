//! Errors that several modules make.

use outcore::{Error, ErrorKind};

/// An argument, or a call at this moment, that is not accepted.
pub(crate) fn invalid(what: String, remedy: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, what).remedy(remedy)
}

/// Bytes of a tensor are not what the optimizer has made it for.
pub(crate) fn of_other_elements(cause: bytemuck::PodCastError) -> Error {
    Error::new(ErrorKind::Internal, format!("a tensor has no such elements: {cause}")).remedy("report this as a bug")
}
