//! Streams that capture: their work becomes nodes of a graph.

use crate::abi::*;
use crate::driver::{Driver, Guard};
use crate::state::graphs::{CaptureId, CapturedPoint, Node};
use crate::work::Work;

pub fn capture_of(driver: &Driver, stream: u64) -> Option<(CaptureId, usize)> {
    driver.streams.get(&stream)?.capture
}

/// Where a capturing stream stands; `None` if it does not capture.
pub fn captured_point(driver: &Driver, stream: u64) -> Option<CapturedPoint> {
    let (id, branch) = capture_of(driver, stream)?;
    let capture = driver.graphs.captures.get(&id)?;
    Some(CapturedPoint { capture: id, after: capture.after[branch].clone() })
}

/// Adds work to the graph that the stream captures.
pub fn capture(driver: &mut Guard, stream: u64, work: Work) -> Outcome {
    let (id, branch) = capture_of(driver, stream).ok_or(ERROR_INVALID_HANDLE)?;
    let capture = driver.graphs.captures.get_mut(&id).ok_or(ERROR_STREAM_CAPTURE_INVALIDATED)?;
    if capture.invalid {
        return Err(ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    let node = capture.nodes.len();
    let after = std::mem::replace(&mut capture.after[branch], vec![node]);
    capture.nodes.push(Node { branch, work, after });
    Ok(())
}

/// A stream waits for a captured event: it joins the capture.
pub fn join(driver: &mut Guard, stream: u64, point: CapturedPoint) -> Outcome {
    let branch = match capture_of(driver, stream) {
        Some((id, _)) if id != point.capture => return Err(ERROR_STREAM_CAPTURE_MERGE),
        Some((_, branch)) => Some(branch),
        None => None,
    };
    let Some(capture) = driver.graphs.captures.get_mut(&point.capture) else { return Err(ERROR_CAPTURED_EVENT) };
    let branch = branch.unwrap_or(capture.after.len());
    if branch == capture.after.len() {
        capture.after.push(Vec::new());
    }
    for node in point.after {
        if !capture.after[branch].contains(&node) {
            capture.after[branch].push(node);
        }
    }
    if let Some(stream) = driver.streams.get_mut(&stream) {
        stream.capture = Some((point.capture, branch));
    }
    Ok(())
}

/// A call that is not allowed while capturing spoils the capture.
pub fn invalidate(driver: &mut Guard, stream: u64) {
    if let Some((id, _)) = capture_of(driver, stream)
        && let Some(capture) = driver.graphs.captures.get_mut(&id)
    {
        capture.invalid = true;
    }
}
