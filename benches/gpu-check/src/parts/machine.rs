//! What the machine has, as far as the other parts' numbers depend on it.

use std::fs;

use outcore::machine::{Machine, memcpy_bandwidth};
use outcore::store::probe_backend;
use outcore::{Bytes, IoBackend};

use crate::cuda::{Gpu, cublas_found};
use crate::report::{Report, Unit};
use crate::{Failure, Settings};

pub(super) fn run(settings: &Settings, report: &mut Report<'_>) -> Result<(), Failure> {
    let gpus = outcore_cuda::cuda_devices()?;
    let gpu = Gpu::open(settings.device)?;
    if let Some(info) = gpus.get(settings.device as usize) {
        report.chosen("gpu", &info.name);
        report.chosen("compute capability", format!("{}.{}", info.capability.0, info.capability.1));
        report.chosen("driver", format!("CUDA {}.{}", info.driver.0, info.driver.1));
    }
    let (free, total) = gpu.memory()?;
    report.number("free memory of the GPU", Unit::Bytes, &[free as f64], Some("memory of the GPU"));
    report.number("memory of the GPU", Unit::Bytes, &[total as f64], None);
    report.chosen("allocation granularity", Bytes::new(gpu.granularity()?));
    report.chosen("cuBLAS", if cublas_found() { "found" } else { "not found" });
    let machine = Machine::detect()?;
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    report
        .chosen("processor", format!("{} x {}", machine.cpus, model.map_or(std::env::consts::ARCH, |(_, name)| name)));
    report.chosen("kernel", &machine.kernel);
    report.chosen("host memory", format!("{}, of which {} may be used", machine.memory.limit, settings.memory));
    let lockable = machine.lockable.map_or_else(|| "without limit".to_owned(), |bytes| bytes.to_string());
    report.chosen("lockable without CAP_IPC_LOCK", lockable);
    let len = settings.pick(Bytes::mib(512), Bytes::mib(256), Bytes::mib(8));
    let copied = memcpy_bandwidth(len).get() as f64 / 1e9;
    report.number("memory copy, one thread", Unit::GigabytesPerSecond, &[copied], None);
    for backend in IoBackend::CHOICES {
        report.chosen(
            &format!("I/O by {backend}"),
            match probe_backend(backend).usable {
                Ok(()) => "works".to_owned(),
                Err(error) => error.to_string(),
            },
        );
    }
    Ok(())
}
