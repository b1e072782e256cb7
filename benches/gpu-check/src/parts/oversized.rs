//! Passes over models larger than the device budget: one that is in host memory, one of which most is on disk.
//!
//! The roofline of a pass is the longest of three times: its computing, between events before and behind the work with
//! each tensor; the bytes that no budget of this size could keep on the device, at the rate of one large copy; the
//! bytes that neither tier could keep, at the rate of the disk. All are measured by the same run.

use outcore::device::DeviceFactory;
use outcore::store::{QueueDepth, probe_file};
use outcore::{Bytes, IoBackend};
use outcore_cuda::CudaDeviceSelector;

use crate::Failure;
use crate::Settings;
use crate::compute::{Amount, Compute};
use crate::cuda::Gpu;
use crate::model::{ModelFile, Opened, Shape, expected_sums};
use crate::report::{Goal, Report, Spread, Unit};

use super::copies::Link;
use super::pass::{Passes, Pinned, builder, report_processor, verify};

type Result<T = ()> = std::result::Result<T, Failure>;

/// Rows of the product with each tensor: a small batch of tokens.
const TOKENS: u32 = 16;

/// How many tensors there are, and what they have to fit into.
struct Plan {
    tensors: u64,
    device: Bytes,
    host: Bytes,
    /// Whether everything is in memory after the first passes.
    settles: bool,
}

/// 24 GB of tensors in host memory, through a sixth of that on the device.
pub(super) fn in_host_memory(settings: &Settings, report: &mut Report<'_>) -> Result {
    let gpu = Gpu::open(settings.device)?;
    let file = ModelFile::ensure(settings, report)?;
    let tensor = file.shape.bytes();
    let wanted = settings.pick(24_000_000_000_u64, 12_000_000_000, 64 << 20);
    let tensors = wanted.min(settings.memory.get() * 7 / 10) / tensor;
    if wanted / tensor > tensors {
        report.note(format!("{} was wanted; {} of host memory may be used", Bytes::new(wanted), settings.memory));
    }
    let opens = tensors.div_ceil(file.tensors);
    if opens > 1 {
        report.note(format!("the file is opened {opens} times, and each time counts as a model with pages of its own"));
    }
    let device = Bytes::new((tensors / 6).max(5) * tensor);
    run(settings, report, &gpu, &file, &Plan { tensors, device, host: Bytes::new(tensors * tensor), settles: true })
}

/// The whole file, through a sixth of it on the device and a third in the host tier; the rest comes from the disk.
pub(super) fn from_disk(settings: &Settings, report: &mut Report<'_>) -> Result {
    let gpu = Gpu::open(settings.device)?;
    let file = ModelFile::ensure(settings, report)?;
    let tensor = file.shape.bytes();
    let host = (file.bytes() / 3).min(settings.memory.get() / 2) / tensor * tensor;
    let device = Bytes::new((file.tensors / 6).max(5) * tensor);
    let plan = Plan { tensors: file.tensors, device, host: Bytes::new(host), settles: false };
    run(settings, report, &gpu, &file, &plan)
}

/// Bytes a second that the store reads from the disk.
fn disk_rate(settings: &Settings, file: &ModelFile) -> Result<f64> {
    let (page, depth) = (Bytes::new(settings.page.bytes()), QueueDepth::new(32)?);
    let bytes = settings.pick(Bytes::mib(512), Bytes::mib(512), Bytes::mib(16));
    let probe = probe_file(&file.path, IoBackend::Auto, &[page], &[depth], bytes)?;
    let point =
        probe.points.first().ok_or_else(|| Failure::Impossible("the file is smaller than a page".to_owned()))?;
    Ok(point.bytes_per_second() / 1e9)
}

fn run(settings: &Settings, report: &mut Report<'_>, gpu: &Gpu, file: &ModelFile, plan: &Plan) -> Result {
    let Shape { rows, cols } = file.shape;
    let total = plan.tensors * file.shape.bytes();
    report.chosen("model", format!("{} in {} tensors of {rows} x {cols}", Bytes::new(total), plan.tensors));
    report.number("bytes of the model", Unit::Bytes, &[total as f64], None);
    report.number("device budget", Unit::Bytes, &[plan.device.get() as f64], None);
    report.chosen("host tier", plan.host);
    let sums = expected_sums(file);
    let link = Link::new(gpu, settings.pick(1 << 30, 1 << 30, 8 << 20))?;
    let mut compute = Compute::new(gpu, file.shape, TOKENS, report)?;
    // Asked before the runtime takes its frames, after everything else has been taken.
    gpu.synchronize()?;
    let free = gpu.memory()?.0;
    let runtime = builder(settings)?.device_budget(plan.device).host_budget(plan.host).open()?;
    let opened = Opened::new(&runtime, file, plan.tensors)?;
    verify(&runtime, &opened.tensors, &mut compute, &sums)?;
    report.note("every tensor, as the GPU saw it, is what was written to the file");

    let mut passes = Passes::new(gpu, &runtime, &opened.tensors, &compute)?;
    let settled = passes.settle(if plan.settles { 3 } else { 1 })?;
    if plan.settles && settled.read > 0 {
        report.note(format!("{} still came from the disk after the first passes", Bytes::new(settled.read)));
    }

    // Whatever the order of eviction, no more than the budget is kept for the next pass.
    let through_link = total.saturating_sub(plan.device.get());
    let through_disk = through_link.saturating_sub(plan.host.get());
    let (mut seconds, mut shares, mut rates, mut disks) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut moved, mut rooflines, mut read, mut computing) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut by_thread, mut for_stream) = (Vec::new(), Vec::new());
    for _ in 0..settings.pick(3, 2, 1) {
        let rate = link.up_rate()?;
        let mut roofline = through_link as f64 / rate / 1e9;
        if !plan.settles {
            let disk = disk_rate(settings, file)?;
            disks.push(disk);
            roofline = roofline.max(through_disk as f64 / disk / 1e9);
        }
        let passed = passes.run(Amount(1))?;
        // Alone, the same work runs at another clock.
        roofline = roofline.max(passed.computing);
        computing.push(passed.computing);
        seconds.push(passed.seconds);
        rates.push(rate);
        rooflines.push(roofline);
        shares.push(passed.seconds / roofline);
        moved.push(passed.moved as f64 / through_link.max(1) as f64);
        read.push(passed.read as f64 / through_disk.max(1) as f64);
        by_thread.push(passed);
        for_stream.push(passes.run_pinned(Amount(1), Pinned::ForStream)?);
    }
    let used = free.saturating_sub(gpu.memory()?.0) as f64;
    report.number("host to device, one copy", Unit::GigabytesPerSecond, &rates, None);
    report.number("disk, a page at a time, 32 in flight", Unit::GigabytesPerSecond, &disks, None);
    report.number("computing, in the pass", Unit::Seconds, &computing, None);
    report.number("roofline", Unit::Seconds, &rooflines, None);
    report.number("pass", Unit::Seconds, &seconds, Some("roofline"));
    let seconds_for_stream: Vec<f64> = for_stream.iter().map(|passed| passed.seconds).collect();
    report.number("pass, pinned for the stream", Unit::Seconds, &seconds_for_stream, Some("roofline"));
    report_processor(report, "pass", settings.page.bytes(), &by_thread);
    report_processor(report, "pass, pinned for the stream", settings.page.bytes(), &for_stream);
    let through: Vec<f64> = seconds.iter().map(|s| total as f64 / s / 1e9).collect();
    report.number("weights used", Unit::GigabytesPerSecond, &through, None);
    report.number("bytes over the link / least possible", Unit::Ratio, &moved, None);
    if !plan.settles {
        report.number("bytes from the disk / least possible", Unit::Ratio, &read, None);
    }
    let share = Spread::of(&shares).map_or(f64::NAN, |spread| spread.median);
    let formula = if plan.settles {
        "pass / max(computing in the pass, (model - device budget) / rate of one copy); median of rounds"
    } else {
        "pass / max(computing in the pass, (model - device budget) / rate of one copy, (model - device budget - host \
         tier) / rate of the disk); median of rounds"
    };
    report.verdict(
        "pass over the roofline",
        share,
        Unit::Ratio,
        Goal::AtMost(if plan.settles { 1.05 } else { 1.03 }),
        formula,
    );
    report.number("memory of the GPU that the runtime took", Unit::Bytes, &[used], None);
    let formula = "(free before the runtime was opened - free after the last pass) / (device budget + the GPU's page \
                   tables for the host tier and the staging buffers)";
    let locked = plan.host + runtime.stats().memory.staging;
    let tables = CudaDeviceSelector::default().tables_of_host_memory(locked);
    report.number("page tables of the GPU for host memory", Unit::Bytes, &[tables.get() as f64], None);
    let over = used / (plan.device + tables).get() as f64;
    report.verdict("memory of the GPU over the budget", over, Unit::Ratio, Goal::AtMost(1.01), formula);
    let stats = runtime.stats();
    if stats.traffic.peak_device > plan.device {
        return Err(Failure::Wrong(format!(
            "{} in frames, with a budget of {}",
            stats.traffic.peak_device, plan.device
        )));
    }
    drop(passes);
    drop(opened);
    runtime.close()?;
    Ok(())
}
