//! Which GPU is meant, and what is known of the GPUs there are.

use std::fmt;
use std::str::FromStr;

use outcore::{Bytes, Error, ErrorKind, Result};

/// Names one GPU. Ordinals follow `CUDA_VISIBLE_DEVICES` and may change between starts; the other two do not.
///
/// ```
/// use outcore_cuda::CudaDeviceSelector;
///
/// assert_eq!("1".parse::<CudaDeviceSelector>()?, CudaDeviceSelector::Ordinal(1));
/// let pci: CudaDeviceSelector = "0000:3b:00.0".parse()?;
/// assert_eq!(pci.to_string(), "0000:3b:00.0");
/// assert!("gpu".parse::<CudaDeviceSelector>().is_err());
/// # Ok::<(), outcore::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CudaDeviceSelector {
    /// The driver's number, from 0.
    Ordinal(u32),
    /// `GPU-`, or `MIG-` for an instance of a partitioned GPU, and 32 hexadecimal digits in five groups. A process sees
    /// those instances that `CUDA_VISIBLE_DEVICES` names.
    Uuid(String),
    /// `domain:bus:device.function`, hexadecimal.
    Pci(String),
}

impl Default for CudaDeviceSelector {
    /// The first GPU.
    fn default() -> Self {
        Self::Ordinal(0)
    }
}

impl CudaDeviceSelector {
    /// Whether it means this GPU.
    pub(crate) fn means(&self, gpu: &CudaDeviceInfo) -> bool {
        match self {
            Self::Ordinal(ordinal) => gpu.ordinal == *ordinal,
            // The driver gives an instance's digits as it gives a GPU's, and does not say which it is.
            Self::Uuid(uuid) => digits(&gpu.uuid).eq_ignore_ascii_case(digits(uuid)),
            Self::Pci(address) => gpu.pci.eq_ignore_ascii_case(address),
        }
    }
}

/// A UUID without its prefix.
fn digits(uuid: &str) -> &str {
    uuid.split_once('-').map_or(uuid, |(_, digits)| digits)
}

impl FromStr for CudaDeviceSelector {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let hex = |part: &str, digits: usize| part.len() == digits && part.bytes().all(|c| c.is_ascii_hexdigit());
        if let Ok(ordinal) = text.parse() {
            return Ok(Self::Ordinal(ordinal));
        }
        let groups: Vec<&str> = text.split('-').collect();
        if let [kind @ ("GPU" | "MIG"), a, b, c, d, e] = groups[..]
            && hex(a, 8)
            && hex(b, 4)
            && hex(c, 4)
            && hex(d, 4)
            && hex(e, 12)
        {
            return Ok(Self::Uuid(format!("{kind}-{}", digits(text).to_ascii_lowercase())));
        }
        let parts: Vec<&str> = text.split([':', '.']).collect();
        match parts[..] {
            // Some tools write the domain with eight digits.
            [domain, bus, device, function]
                if (hex(domain, 4) || hex(domain, 8)) && hex(bus, 2) && hex(device, 2) && hex(function, 1) =>
            {
                let domain = &domain[domain.len() - 4..];
                Ok(Self::Pci(format!("{domain}:{bus}:{device}.{function}").to_ascii_lowercase()))
            }
            _ => Err(Error::new(ErrorKind::InvalidArgument, format!("{text:?} names no GPU"))
                .remedy("give its number (0), its UUID (GPU-..., MIG-...) or its PCI address (0000:3b:00.0); `outcore doctor` lists them")),
        }
    }
}

impl fmt::Display for CudaDeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ordinal(ordinal) => write!(f, "{ordinal}"),
            Self::Uuid(text) | Self::Pci(text) => f.write_str(text),
        }
    }
}

/// A GPU, as its driver describes it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CudaDeviceInfo {
    /// The driver's number.
    pub ordinal: u32,
    /// `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// `GPU-...`; of an instance of a partitioned GPU its own digits, which tools show as `MIG-...`.
    pub uuid: String,
    /// `0000:3b:00.0`.
    pub pci: String,
    /// All its memory.
    pub memory: Bytes,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Whether it can map memory under addresses of our choice, without which it cannot be used.
    pub virtual_memory: bool,
    /// The CUDA version the driver supports.
    pub driver: (u32, u32),
    /// The node of the machine's memory that is nearest to it; `None` where the machine has one, or does not say.
    pub numa_node: Option<u32>,
}
