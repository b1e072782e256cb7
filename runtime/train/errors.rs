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

/// The runtime's device has no kernel of a rule.
pub(crate) fn no_kernel(rule: &str) -> Error {
    let what = format!("the rule {rule:?} has no kernel, and the host cannot address the device's memory");
    Error::new(ErrorKind::Unsupported, what).remedy("use AdamW or Sgd, or a runtime on the host")
}
