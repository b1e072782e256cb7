//! Where weights are paged to and computed with.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use outcore::device::{DeviceFactory, Host};
use outcore::{Error, ErrorKind, Result};
use outcore_llm::CudaDeviceSelector;

/// The option `--device`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// This machine's processor and memory.
    #[default]
    Host,
    /// A GPU.
    Cuda(CudaDeviceSelector),
}

impl Device {
    /// What opens the device tier.
    pub fn factory(&self) -> Arc<dyn DeviceFactory> {
        match self {
            Self::Host => Arc::new(Host),
            Self::Cuda(selector) => Arc::new(selector.clone()),
        }
    }
}

impl FromStr for Device {
    type Err = Error;

    /// `host`, `cuda`, or `cuda:` and a selector.
    fn from_str(text: &str) -> Result<Self> {
        match text.split_once(':') {
            None if text == "host" => Ok(Self::Host),
            None if text == "cuda" => Ok(Self::Cuda(CudaDeviceSelector::default())),
            Some(("cuda", selector)) => selector.parse().map(Self::Cuda),
            _ => Err(Error::new(ErrorKind::InvalidArgument, format!("device {text:?} does not exist"))
                .remedy("choose host, cuda, or cuda: and a GPU's number, UUID or PCI address")),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda(selector) => write!(f, "cuda:{selector}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names_that_can_be_read_back() {
        let uuid = "0f0e0d0c-0b0a-0908-0706-050403020100";
        let (gpu, mig) = (format!("cuda:GPU-{uuid}"), format!("cuda:MIG-{uuid}"));
        for name in ["host", "cuda:0", "cuda:12", "cuda:0000:3b:00.0", &gpu, &mig] {
            assert_eq!(name.parse::<Device>().unwrap().to_string(), name);
        }
        assert_eq!("cuda".parse::<Device>().unwrap(), "cuda:0".parse().unwrap());
        for wrong in ["", "gpu", "sim", "sim:0", "host:0"] {
            let error = wrong.parse::<Device>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().contains(&format!("{wrong:?}")), "{error}");
            assert!(error.advice().is_some_and(|advice| advice.contains("PCI address")), "{error:?}");
        }
    }
}
