//! Copies between locked host memory and the GPU: by page size, up, down and both ways; batches against loops.
//!
//! The ceiling is one copy of the whole buffer, measured in the same round. Pages are copied to and from shuffled
//! places on the device, since that is where frames lie.

use std::time::Instant;

use outcore::Bytes;

use crate::cuda::{DeviceMemory, Event, EventKind, Gpu, HostMemory, Stream};
use crate::model::noise;
use crate::report::{Goal, Report, Spread, Unit};
use crate::{Failure, Settings};

type Result<T = ()> = std::result::Result<T, Failure>;

/// Pages of a batch; and the sizes of batches for the page size that is judged. The runtime's batches are of up to 4.
const BATCH: usize = 128;
const BATCHES: [usize; 4] = [1, 4, 16, BATCH];

/// A permutation of `0..count` that leaves little in order: it steps by a number without a divisor in common with
/// `count`.
fn shuffled(count: u64) -> Vec<u64> {
    const STEP: u64 = 0x9E37_79B1;
    // Page counts are powers of two, and the step is odd.
    (0..count).map(|n| n.wrapping_mul(STEP) % count).collect()
}

/// The GPU's link, with buffers large enough to measure it.
pub(super) struct Link {
    bytes: u64,
    up_host: HostMemory,
    down_host: HostMemory,
    up_device: DeviceMemory,
    down_device: DeviceMemory,
    up: Stream,
    down: Stream,
    start: Event,
    end: Event,
    joint: Event,
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Up,
    Down,
    Both,
}

impl Way {
    const ALL: [Self; 3] = [Self::Up, Self::Down, Self::Both];

    fn name(self) -> &'static str {
        match self {
            Self::Up => "host to device",
            Self::Down => "device to host",
            Self::Both => "both ways",
        }
    }
}

/// The result of a run of copies.
struct Copied {
    /// Bytes a second, in 10^9, both ways added up.
    rate: f64,
    /// Seconds of the processor that submitting one copy took.
    submit: f64,
}

impl Link {
    pub(super) fn new(gpu: &Gpu, bytes: u64) -> Result<Self> {
        let mut up_host = HostMemory::alloc(gpu, bytes)?;
        noise(0, 0, up_host.bytes_mut()?);
        let mut down_host = HostMemory::alloc(gpu, bytes)?;
        down_host.bytes_mut()?.fill(0);
        Ok(Self {
            bytes,
            up_host,
            down_host,
            up_device: DeviceMemory::new(gpu, bytes)?,
            down_device: DeviceMemory::new(gpu, bytes)?,
            up: gpu.stream()?,
            down: gpu.stream()?,
            start: gpu.event(EventKind::Timed)?,
            end: gpu.event(EventKind::Timed)?,
            joint: gpu.event(EventKind::Timed)?,
        })
    }

    /// Bytes a second, in 10^9, of one copy of everything to the device: the ceiling of every fill.
    pub(super) fn up_rate(&self) -> Result<f64> {
        Ok(self.copy(Way::Up, self.bytes)?.rate)
    }

    fn copy(&self, way: Way, page: u64) -> Result<Copied> {
        let places = shuffled(self.bytes / page);
        let begin = Instant::now();
        self.up.record(&self.start)?;
        self.down.wait(&self.start)?;
        for (n, place) in places.iter().enumerate() {
            let (host, device) = (n as u64 * page, place * page);
            if way != Way::Down {
                self.up.copy_in(&self.up_host, host, self.up_device.address + device, page)?;
            }
            if way != Way::Up {
                self.down.copy_out(self.down_device.address + device, &self.down_host, host, page)?;
            }
        }
        self.down.record(&self.joint)?;
        self.up.wait(&self.joint)?;
        self.up.record(&self.end)?;
        let submitted = begin.elapsed().as_secs_f64();
        self.end.synchronize()?;
        let ways = if way == Way::Both { 2.0 } else { 1.0 };
        Ok(Copied {
            rate: ways * self.bytes as f64 / self.start.seconds_to(&self.end)? / 1e9,
            submit: submitted / ways / places.len() as f64,
        })
    }

    /// The same as `copy(Way::Up, page)`, in batches.
    fn copy_in_batches(&self, page: u64, of: usize) -> Result<Copied> {
        let places = shuffled(self.bytes / page);
        let pieces: Vec<(u64, u64)> = places
            .iter()
            .enumerate()
            .map(|(n, place)| (n as u64 * page, self.up_device.address + place * page))
            .collect();
        let begin = Instant::now();
        self.up.record(&self.start)?;
        pieces.chunks(of).try_for_each(|batch| self.up.copy_in_batch(&self.up_host, batch, page))?;
        self.up.record(&self.end)?;
        let submitted = begin.elapsed().as_secs_f64();
        self.end.synchronize()?;
        Ok(Copied {
            rate: self.bytes as f64 / self.start.seconds_to(&self.end)? / 1e9,
            submit: submitted / places.len() as f64,
        })
    }

    /// Checks that bytes are the same after they went up and came down.
    fn verify(&mut self, page: u64) -> Result {
        let places = shuffled(self.bytes / page);
        for (n, place) in places.iter().enumerate() {
            self.up.copy_in(&self.up_host, n as u64 * page, self.up_device.address + place * page, page)?;
        }
        self.up.record(&self.end)?;
        self.down.wait(&self.end)?;
        for (n, place) in places.iter().enumerate() {
            self.down.copy_out(self.up_device.address + place * page, &self.down_host, n as u64 * page, page)?;
        }
        let expected = self.up_host.bytes_mut()?;
        if self.down_host.bytes_mut()? != expected {
            return Err(Failure::Wrong("pages that were copied to the GPU and back differ".to_owned()));
        }
        Ok(())
    }
}

pub(super) fn run(settings: &Settings, report: &mut Report<'_>) -> Result {
    let gpu = Gpu::open(settings.device)?;
    let bytes = settings.pick(1 << 30, 512 << 20, 8 << 20);
    let chosen_page = settings.page.bytes();
    let mut pages: Vec<u64> = [64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20, 64 << 20]
        .into_iter()
        .filter(|page| *page < bytes)
        .collect();
    if !pages.contains(&chosen_page) {
        pages.push(chosen_page);
    }
    report.chosen("bytes each way", Bytes::new(bytes));
    report.chosen("page the verdicts are about", Bytes::new(chosen_page));
    let mut link = Link::new(&gpu, bytes)?;
    link.verify(chosen_page)?;

    // By way, then by page, the ceiling first.
    let sizes: Vec<u64> = std::iter::once(bytes).chain(pages.iter().copied()).collect();
    let mut rates = vec![vec![Vec::new(); sizes.len()]; Way::ALL.len()];
    let mut submits = vec![Vec::new(); sizes.len()];
    for _ in 0..settings.rounds() {
        for (of_way, way) in rates.iter_mut().zip(Way::ALL) {
            for (at, page) in sizes.iter().enumerate() {
                let copied = link.copy(way, *page)?;
                of_way[at].push(copied.rate);
                if way == Way::Up {
                    submits[at].push(copied.submit * 1e6);
                }
            }
        }
    }
    for (of_way, way) in rates.iter().zip(Way::ALL) {
        let ceiling = format!("{}, one copy", way.name());
        report.number(&ceiling, Unit::GigabytesPerSecond, &of_way[0], None);
        for (page, rounds) in sizes.iter().zip(of_way).skip(1) {
            let name = format!("{}, pages of {}", way.name(), Bytes::new(*page));
            report.number(name, Unit::GigabytesPerSecond, rounds, Some(&ceiling));
        }
    }
    for (page, rounds) in sizes.iter().zip(&submits).skip(1) {
        report.number(format!("submit a copy of {}", Bytes::new(*page)), Unit::Microseconds, rounds, None);
    }
    if let Some(at) = sizes.iter().skip(1).position(|page| *page == chosen_page).map(|at| at + 1) {
        for (way, goal) in [(Way::Up, 0.97), (Way::Down, 0.97), (Way::Both, 0.90)] {
            let of_way = &rates[way as usize];
            let shares: Vec<f64> = of_way[at].iter().zip(&of_way[0]).map(|(page, whole)| page / whole).collect();
            let formula = format!(
                "rate of pages of {} / rate of one copy of {}, same round; median of {} rounds",
                Bytes::new(chosen_page),
                Bytes::new(bytes),
                shares.len()
            );
            // The way down has the goal of the way up, because it is of the same kind.
            let share = Spread::of(&shares).map_or(f64::NAN, |spread| spread.median);
            report.verdict(way.name(), share, Unit::Ratio, Goal::AtLeast(goal), formula);
        }
    }
    // Last, because an old driver has no such call.
    let of_one_size = pages.iter().filter(|page| **page <= 4 << 20 && **page != chosen_page).map(|page| (*page, BATCH));
    for (page, batch) in of_one_size.chain(BATCHES.map(|batch| (chosen_page, batch))) {
        let (mut rate, mut submit, mut share) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..settings.rounds() {
            let looped = link.copy(Way::Up, page)?;
            let batched = link.copy_in_batches(page, batch)?;
            rate.push(batched.rate);
            submit.push(batched.submit * 1e6);
            share.push(batched.rate / looped.rate);
        }
        let name = format!("batches of {batch}, pages of {}", Bytes::new(page));
        report.number(&name, Unit::GigabytesPerSecond, &rate, Some("host to device, one copy"));
        report.number(format!("{name}: submit a copy"), Unit::Microseconds, &submit, None);
        report.number(format!("{name}: batched / looped"), Unit::Ratio, &share, None);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::shuffled;

    #[test]
    fn every_place_is_visited_once() {
        for count in [1, 2, 8, 1024] {
            let mut places = shuffled(count);
            places.sort_unstable();
            assert_eq!(places, (0..count).collect::<Vec<_>>());
        }
    }
}
