//! How work becomes something a stream's thread runs.
//!
//! Addresses are resolved, checked and given to the judge only when the work is issued. So each launch of a graph uses
//! the mappings of that moment.

use std::sync::Arc;
use std::time::Instant;

use crate::clock::Clock;
use crate::driver::{Driver, HOST_FUNCTION, InHostFunction, lock, notify};
use crate::judge::{Op, Space, Touch};
use crate::launch::Late;
use crate::reach::Reach;
use crate::state::memory::Piece;
use crate::state::streams::Run;
use crate::work::{Action, Work};

/// Memory that is resolved: where a copy really reads or writes.
enum Place {
    Device(Vec<Piece>),
    Host(usize),
}

impl Driver {
    fn place(&self, address: u64, len: u64, write: bool) -> Result<Place, String> {
        if self.memory.is_device(address) {
            self.memory.resolve(address, len, write).map(Place::Device)
        } else {
            Ok(Place::Host(address as usize))
        }
    }

    /// What a kernel touches at an address that it has found while it runs: checked against the mappings of this
    /// moment. Where it is in the window, or in words why it may not be touched.
    pub fn touch_late(&mut self, late: &Late, reach: Reach) -> Result<u64, String> {
        let (touches, mappings) = self.touches(&[reach])?;
        for mapping in mappings {
            self.memory.used(mapping, late.op.timeline, late.op.number);
        }
        self.judge.touch_late(&late.op, &late.clock, &late.submitted, &touches);
        Ok(self.memory.shadow_of(reach.address).unwrap_or(reach.address))
    }

    /// The ranges of `reach` as the judge counts them, and the mappings they lie in.
    fn touches(&self, reach: &[Reach]) -> Result<(Vec<Touch>, Vec<u64>), String> {
        let mut touches = Vec::new();
        let mut mappings = Vec::new();
        for &Reach { address, len, write } in reach {
            if self.memory.is_device(address) {
                for piece in self.memory.resolve(address, len, write)? {
                    let space = Space::Device(piece.physical);
                    touches.push(Touch { space, start: piece.offset, len: piece.len, write });
                    mappings.push(piece.mapping);
                }
            } else {
                touches.push(Touch { space: Space::Host, start: address, len, write });
            }
        }
        Ok((touches, mappings))
    }

    /// Checks work against the mappings of this moment, gives it to the judge as operation `op`, and makes what the
    /// stream's thread will run. Changes nothing where it returns an error.
    pub fn prepare(&mut self, op: &Op, clock: &Clock, work: &Work) -> Result<Option<Run>, String> {
        let (mut touches, mappings) = self.touches(&work.reach)?;
        if let Some(physical) = work.whole {
            let len = self.memory.size_of(physical);
            touches.push(Touch { space: Space::Device(physical), start: 0, len, write: true });
        }
        let run = self.run(op, clock, &work.action)?;
        for mapping in mappings {
            self.memory.used(mapping, op.timeline, op.number);
        }
        self.judge.touch(op, clock, &touches);
        Ok(run)
    }

    fn run(&self, op: &Op, clock: &Clock, action: &Action) -> Result<Option<Run>, String> {
        Ok(Some(match action {
            Action::Mark => return Ok(None),
            Action::Stamp(time) => {
                let time = Arc::clone(time);
                Box::new(move || {
                    let _ = time.set(Instant::now());
                    Ok(())
                })
            }
            Action::Copies { copies, staged } => {
                let staged = Arc::clone(staged);
                let mut resolved = Vec::new();
                for copy in copies {
                    resolved.push((
                        self.place(copy.to, copy.len, true)?,
                        self.place(copy.from, copy.len, false)?,
                        copy.len,
                    ));
                }
                let window = self.memory.window();
                Box::new(move || {
                    for (to, from, len) in &resolved {
                        let direction = match (to, from) {
                            (Place::Device(_), Place::Host(_)) => Some(0),
                            (Place::Host(_), Place::Device(_)) => Some(1),
                            _ => None,
                        };
                        if let Some(direction) = direction {
                            cross_link(direction, *len);
                        }
                        copy(window, to, from, *len);
                    }
                    drop(staged);
                    Ok(())
                })
            }
            &Action::Fill { address, count, pattern, width } => {
                let place = self.place(address, count * u64::from(width), true)?;
                let window = self.memory.window();
                Box::new(move || {
                    let bytes = pattern.to_le_bytes();
                    let unit = &bytes[..usize::from(width)];
                    for_each_span(window, &place, count * u64::from(width), |target, at, len| {
                        for i in 0..len {
                            // SAFETY: `for_each_span` gives ranges within the window or within host memory, which the
                            // submitter keeps valid until the work is done.
                            unsafe { target.add(i).write(unit[(at + i) % unit.len()]) };
                        }
                    });
                    Ok(())
                })
            }
            Action::Launch(launch) => {
                let launch = Arc::clone(launch);
                let submitted = self.timelines.iter().map(|timeline| timeline.submitted).collect();
                let late = Late { op: op.clone(), clock: clock.clone(), submitted };
                Box::new(move || {
                    let gate = lock().config.gate.take();
                    launch.run(late, gate)
                })
            }
            &Action::HostFunction { function, argument } => {
                let inside = InHostFunction { op: op.clone(), clock: clock.clone() };
                Box::new(move || {
                    {
                        let mut driver = lock();
                        // The host now knows what came before the function.
                        driver.known.join(&inside.clock);
                        driver.running -= 1;
                        notify();
                    }
                    HOST_FUNCTION.set(Some(inside));
                    if let Some(function) = function {
                        // SAFETY: cuLaunchHostFunc's caller promises a function that may be called with this argument.
                        unsafe { function(argument as *mut libc::c_void) };
                    }
                    HOST_FUNCTION.set(None);
                    lock().running += 1;
                    Ok(())
                })
            }
            &Action::Release(physical) => Box::new(move || {
                let mut driver = lock();
                driver.judge.forget_space(Space::Device(physical));
                driver.memory.release_physical(physical);
                Ok(())
            }),
        }))
    }
}

/// Takes the time the bytes need on the link, if one is modelled.
fn cross_link(direction: usize, bytes: u64) {
    let mut driver = lock();
    let rate = driver.config.link[direction];
    let end = driver.link.take(direction, bytes, rate);
    drop(driver);
    if let Some(end) = end {
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
    }
}

/// Calls `f(pointer, offset, len)` for each contiguous span of `place`.
fn for_each_span(window: usize, place: &Place, len: u64, mut f: impl FnMut(*mut u8, usize, usize)) {
    match place {
        Place::Host(address) => f(*address as *mut u8, 0, len as usize),
        Place::Device(pieces) => {
            let mut at = 0;
            for piece in pieces {
                f((window + piece.at as usize) as *mut u8, at, piece.len as usize);
                at += piece.len as usize;
            }
        }
    }
}

fn copy(window: usize, to: &Place, from: &Place, len: u64) {
    for_each_span(window, to, len, |target, to_at, to_len| {
        for_each_span(window, from, len, |source, from_at, from_len| {
            let start = to_at.max(from_at);
            let end = (to_at + to_len).min(from_at + from_len);
            if start < end {
                // SAFETY: both spans lie within the window, or within host memory that the submitter keeps valid until
                // the work is done; `start..end` lies within both. `copy` allows overlap.
                unsafe { std::ptr::copy(source.add(start - from_at), target.add(start - to_at), end - start) };
            }
        });
    });
}
