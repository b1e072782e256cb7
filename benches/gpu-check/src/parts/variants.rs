//! Other ways to put frames behind addresses than the runtime's: an address beside one that stays (an alias), a part of
//! a larger handle, one large handle, two threads that map; and the tail of each call.

use std::time::Instant;

use outcore::Bytes;

use crate::cuda::{DeviceMemory, Gpu, HostMemory, Physical, Range, Stream};
use crate::report::{Report, Unit};
use crate::{Failure, Settings};

type Result<T = ()> = std::result::Result<T, Failure>;

/// Seconds of single calls.
#[derive(Default)]
struct Calls {
    map: Vec<f64>,
    allow: Vec<f64>,
    unmap: Vec<f64>,
}

/// The value below which a share of the sorted values lies.
fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len() as f64 * share).ceil() as usize;
    values.get(at.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

impl Calls {
    fn report(&mut self, report: &mut Report<'_>, how: &str) {
        for (what, values) in [("map", &mut self.map), ("set access", &mut self.allow), ("unmap", &mut self.unmap)] {
            for (name, share) in [("median", 0.5), ("99.9 %", 0.999), ("longest", 1.0)] {
                let value = percentile(values, share) * 1e6;
                report.number(format!("{how}: {what}, {name}"), Unit::Microseconds, &[value], None);
            }
        }
    }
}

fn timed(into: &mut Vec<f64>, call: impl FnOnce() -> Result) -> Result {
    let start = Instant::now();
    call()?;
    into.push(start.elapsed().as_secs_f64());
    Ok(())
}

/// Maps each handle at its place in the range, allows access to it, and unmaps it again, one after another.
fn cycle(range: &mut Range, handles: &[Physical], page: u64, calls: &mut Calls) -> Result {
    for (at, handle) in handles.iter().enumerate() {
        let offset = at as u64 * page;
        timed(&mut calls.map, || range.map(offset, handle))?;
        timed(&mut calls.allow, || range.allow(offset, page))?;
        timed(&mut calls.unmap, || range.unmap(offset, page))?;
    }
    Ok(())
}

pub(super) fn run(settings: &Settings, report: &mut Report<'_>) -> Result {
    let gpu = Gpu::open(settings.device)?;
    let small = gpu.granularity()?;
    let large = settings.pick(8, 8, 2) * small;
    let count: u64 = settings.pick(64, 64, 4);
    let repeats = settings.pick(40, 20, 2);
    for page in [small, large] {
        let how = format!("handles of {}", Bytes::new(page));
        let handles = (0..count).map(|_| Physical::create(&gpu, page)).collect::<Result<Vec<_>>>()?;
        let mut range = Range::reserve(&gpu, count * page)?;
        let mut calls = Calls::default();
        cycle(&mut range, &handles, page, &mut Calls::default())?;
        (0..repeats).try_for_each(|_| cycle(&mut range, &handles, page, &mut calls))?;
        calls.report(report, &how);
        alias(report, &gpu, &handles, page, repeats)?;
        threads(report, &gpu, &handles, page, repeats)?;
    }
    part(report, &gpu, small, large)
}

/// Every handle is mapped for good in one range; then the same is measured at a second address of it. What is written
/// through one must be read through the other.
fn alias(report: &mut Report<'_>, gpu: &Gpu, handles: &[Physical], page: u64, repeats: usize) -> Result {
    let how = format!("handles of {}, mapped elsewhere for good", Bytes::new(page));
    let len = handles.len() as u64 * page;
    let (mut home, mut range) = (Range::reserve(gpu, len)?, Range::reserve(gpu, len)?);
    for (at, handle) in handles.iter().enumerate() {
        home.map(at as u64 * page, handle)?;
    }
    home.allow(0, len)?;
    let mut calls = Calls::default();
    for _ in 0..repeats {
        cycle(&mut range, handles, page, &mut calls)?;
    }
    calls.report(report, &how);
    let last = len - page;
    if let Some(handle) = handles.last() {
        range.map(last, handle)?;
        range.allow(last, page)?;
        let stream = gpu.stream()?;
        same_bytes(gpu, &stream, home.address(last), range.address(last))?;
        range.unmap(last, page)?;
        report.note(format!("{how}: bytes written through one address are read through the other"));
    }
    Ok(())
}

/// Writes through one address and reads through another.
fn same_bytes(gpu: &Gpu, stream: &Stream, written: u64, read: u64) -> Result {
    const LEN: u64 = 4096;
    let mut host = HostMemory::alloc(gpu, 2 * LEN)?;
    let bytes = host.bytes_mut()?;
    bytes.fill(0);
    for (n, byte) in bytes[..LEN as usize].iter_mut().enumerate() {
        *byte = (n % 251) as u8;
    }
    stream.copy_in(&host, 0, written, LEN)?;
    stream.copy_out(read, &host, LEN, LEN)?;
    let (sent, came) = host.bytes_mut()?.split_at(LEN as usize);
    if sent != came {
        return Err(Failure::Wrong("two addresses of one handle have different bytes".to_owned()));
    }
    Ok(())
}

/// Pages a second that one thread maps and unmaps, and that two do, each in a range of its own.
fn threads(report: &mut Report<'_>, gpu: &Gpu, handles: &[Physical], page: u64, repeats: usize) -> Result {
    let (left, right) = handles.split_at(handles.len() / 2);
    let work = |handles: &[Physical]| -> Result {
        gpu.enter()?;
        let mut range = Range::reserve(gpu, handles.len() as u64 * page)?;
        (0..repeats).try_for_each(|_| cycle(&mut range, handles, page, &mut Calls::default()))
    };
    let done = (handles.len() * repeats) as f64;
    let start = Instant::now();
    work(left)?;
    work(right)?;
    let one = start.elapsed().as_secs_f64() * 1e6 / done;
    let start = Instant::now();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| work(right));
        let mine = work(left);
        mine.and(other.join().unwrap_or_else(|_| Err(Failure::Impossible("a thread panicked".to_owned()))))
    })?;
    let two = start.elapsed().as_secs_f64() * 1e6 / done;
    let of = format!("a page of {}", Bytes::new(page));
    report.number(format!("map, set access and unmap {of}, one thread"), Unit::Microseconds, &[one], None);
    let ceiling = format!("map, set access and unmap {of}, one thread");
    report.number(format!("map, set access and unmap {of}, two threads"), Unit::Microseconds, &[two], Some(&ceiling));
    Ok(())
}

/// Whether a part of a handle that does not begin at its start can be mapped. The documentation forbids it.
fn part(report: &mut Report<'_>, gpu: &Gpu, small: u64, large: u64) -> Result {
    let handle = Physical::create(gpu, large)?;
    let mut range = Range::reserve(gpu, small)?;
    let name = format!("map {} at an offset of {} of a handle", Bytes::new(small), Bytes::new(small));
    match range.map_part(0, &handle, small, small) {
        Ok(()) => {
            range.allow(0, small)?;
            let (stream, other) = (gpu.stream()?, DeviceMemory::new(gpu, small)?);
            stream.zero(range.address(0), small)?;
            stream.copy_within(range.address(0), other.address, small)?;
            stream.synchronize()?;
            report.chosen(&name, "works");
        }
        Err(failure) => report.chosen(&name, failure),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::percentile;

    #[test]
    fn percentiles_of_few_values_are_values() {
        assert!(percentile(&mut [], 0.5).is_nan());
        let mut values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!([0.5, 0.999, 1.0].map(|share| percentile(&mut values, share)), [2.0, 4.0, 4.0]);
        let mut many: Vec<f64> = (1..=2000).map(f64::from).collect();
        assert_eq!(percentile(&mut many, 0.999), 1998.0);
    }
}
