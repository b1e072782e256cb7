//! Events: a place on a timeline, replaced by each record.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::abi::*;
use crate::capture;
use crate::driver::{Driver, Guard, Need, enter, wait_until};
use crate::state::events::{Event, Point};
use crate::stream;
use crate::work::{Action, Work};

const BLOCKING_SYNC: u32 = 1;
const DISABLE_TIMING: u32 = 2;

fn find<'a>(driver: &'a mut Guard, name: &str, handle: u64) -> Outcome<&'a mut Event> {
    let current = driver.contexts.current();
    match driver.events.get(&handle) {
        None => {
            driver.judge.find("misuse", &format!("{name} was given an event that does not exist, or no longer"));
            return Err(ERROR_INVALID_HANDLE);
        }
        // Another context may ask about an event and wait for it, but not record it.
        Some(event) if name.starts_with("cuEventRecord") && Some(event.context) != current => {
            driver.judge.find("context", &format!("{name} was given an event of a context that is not current"));
            return Err(ERROR_INVALID_HANDLE);
        }
        Some(_) => {}
    }
    driver.events.get_mut(&handle).ok_or(ERROR_INVALID_HANDLE)
}

/// Events the program made and did not destroy.
pub fn leaks(driver: &Driver) -> Vec<String> {
    let mut serials: Vec<u64> = driver.events.values().map(|event| event.serial).collect();
    serials.sort_unstable();
    serials.iter().map(|serial| format!("event {serial:#x}")).collect()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventCreate(out: Out<u64>, flags: u32) -> CuResult {
    enter("cuEventCreate", Need::Context, |driver| {
        if flags > 7 {
            return Err(ERROR_INVALID_VALUE);
        }
        let context = driver.contexts.required()?;
        let handle = driver.new_handle();
        let timed = flags & DISABLE_TIMING == 0;
        driver.blocking_events += u64::from(flags & BLOCKING_SYNC != 0);
        driver.events.insert(handle, Event { context, timed, point: Point::Nothing, serial: handle });
        out.set(handle)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(handle: u64) -> CuResult {
    enter("cuEventDestroy_v2", Need::Context, |driver| {
        find(driver, "cuEventDestroy", handle)?;
        // Destroying an event that is not complete is allowed; who waits for it already has its own copy of the point.
        driver.events.remove(&handle);
        Ok(())
    })
}

fn record(name: &'static str, handle: u64, stream: u64) -> CuResult {
    enter(name, Need::Context, |driver| {
        let timed = find(driver, name, handle)?.timed;
        let stream = stream::find(driver, name, stream)?;
        let point = if let Some(point) = capture::captured_point(driver, stream) {
            Point::Captured(point)
        } else {
            let time = Arc::new(OnceLock::new());
            let mut work = Work::mark(name);
            if timed {
                work.action = Action::Stamp(Arc::clone(&time));
            }
            stream::submit(driver, stream, work)?;
            let timeline = driver.streams.get(&stream).map(|s| s.timeline).ok_or(ERROR_INVALID_HANDLE)?;
            let number = driver.timelines[timeline].submitted;
            Point::Stream { timeline, number, clock: driver.timelines[timeline].tail.clone(), time }
        };
        find(driver, name, handle)?.point = point;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(handle: u64, stream: u64) -> CuResult {
    record("cuEventRecord", handle, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecordWithFlags(handle: u64, stream: u64, _flags: u32) -> CuResult {
    record("cuEventRecordWithFlags", handle, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(handle: u64) -> CuResult {
    enter("cuEventQuery", Need::Context, |driver| match find(driver, "cuEventQuery", handle)?.point.clone() {
        Point::Nothing => Ok(()),
        Point::Captured(_) => Err(ERROR_CAPTURED_EVENT),
        Point::Stream { timeline, number, clock, .. } => {
            if driver.timelines[timeline].completed < number {
                return Err(ERROR_NOT_READY);
            }
            driver.known.join(&clock);
            Ok(())
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(handle: u64) -> CuResult {
    enter("cuEventSynchronize", Need::Context, |driver| {
        match find(driver, "cuEventSynchronize", handle)?.point.clone() {
            Point::Nothing => Ok(()),
            Point::Captured(_) => Err(ERROR_CAPTURED_EVENT),
            Point::Stream { timeline, number, clock, .. } => {
                wait_until(driver, |driver| driver.timelines[timeline].completed >= number)?;
                driver.known.join(&clock);
                Ok(())
            }
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: u64, handle: u64, _flags: u32) -> CuResult {
    enter("cuStreamWaitEvent", Need::Context, |driver| {
        let stream = stream::find(driver, "cuStreamWaitEvent", stream)?;
        stream::wait_for_room(driver, stream)?;
        let point = find(driver, "cuStreamWaitEvent", handle)?.point.clone();
        let (timeline, capturing) =
            driver.streams.get(&stream).map(|s| (s.timeline, s.capture.is_some())).ok_or(ERROR_INVALID_HANDLE)?;
        match point {
            Point::Captured(point) => capture::join(driver, stream, point),
            _ if capturing => {
                // A graph cannot depend on what was not captured; an event never recorded is no dependency.
                if matches!(point, Point::Nothing) { Ok(()) } else { Err(ERROR_STREAM_CAPTURE_ISOLATION) }
            }
            Point::Nothing => Ok(()),
            Point::Stream { timeline: other, number, clock, .. } => {
                stream::wait_for(driver, timeline, other, number, &clock);
                Ok(())
            }
        }
    })
}

fn elapsed(name: &'static str, out: &Out<f32>, start: u64, end: u64) -> CuResult {
    enter(name, Need::Context, |driver| {
        let mut times = [Instant::now(); 2];
        for (time, handle) in times.iter_mut().zip([start, end]) {
            let event = find(driver, name, handle)?;
            let Point::Stream { time: stamp, .. } = &event.point else { return Err(ERROR_INVALID_HANDLE) };
            if !event.timed {
                return Err(ERROR_INVALID_HANDLE);
            }
            *time = *stamp.get().ok_or(ERROR_NOT_READY)?;
        }
        let milliseconds = |span: std::time::Duration| span.as_secs_f32() * 1e3;
        out.set(match times[1].checked_duration_since(times[0]) {
            Some(span) => milliseconds(span),
            None => -milliseconds(times[0].duration_since(times[1])),
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime(out: Out<f32>, start: u64, end: u64) -> CuResult {
    elapsed("cuEventElapsedTime", &out, start, end)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime_v2(out: Out<f32>, start: u64, end: u64) -> CuResult {
    elapsed("cuEventElapsedTime_v2", &out, start, end)
}
