//! Stream capture and graphs: what is captured is kept as a list of nodes, and a launch issues them again.
//!
//! The nodes run one after the other on the launching stream, in the order they were captured, which is one of the
//! orders CUDA may choose. The judge sees each captured stream as a timeline of its own, so branches that nothing
//! orders are still found to race.

use std::ffi::c_char;
use std::sync::Arc;

use crate::abi::*;
use crate::capture::capture_of;
use crate::clock::Clock;
use crate::driver::{Driver, Need, enter};
use crate::judge::Op;
use crate::state::graphs::{Capture, Executable, MODE, MODE_GLOBAL, MODE_RELAXED, MODE_THREAD_LOCAL};
use crate::state::streams::Timeline;
use crate::stream;
use crate::work::Work;

#[unsafe(no_mangle)]
pub extern "C" fn cuThreadExchangeStreamCaptureMode(mode: Out<u32>) -> CuResult {
    enter("cuThreadExchangeStreamCaptureMode", Need::Init, |_| {
        let new = mode.get()?;
        if !matches!(new, MODE_GLOBAL | MODE_THREAD_LOCAL | MODE_RELAXED) {
            return Err(ERROR_INVALID_VALUE);
        }
        mode.set(MODE.replace(new))
    })
}

pub fn leaks(driver: &Driver) -> Vec<String> {
    let graphs = driver.graphs.graphs.values().map(|graph| format!("graph of {} nodes", graph.len()));
    let executables =
        driver.graphs.executables.values().map(|e| format!("executable graph of {} nodes", e.graph.len()));
    graphs.chain(executables).collect()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: u64, mode: u32) -> CuResult {
    enter("cuStreamBeginCapture_v2", Need::Context, |driver| {
        if mode > MODE_RELAXED {
            return Err(ERROR_INVALID_VALUE);
        }
        if stream <= 1 {
            return Err(ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        let handle = stream::find(driver, "cuStreamBeginCapture", stream)?;
        if capture_of(driver, handle).is_some() {
            return Err(ERROR_ILLEGAL_STATE);
        }
        let id = driver.new_handle();
        let thread = std::thread::current().id();
        let (nodes, after) = (Vec::new(), vec![Vec::new()]);
        let capture = Capture { origin: handle, mode, thread, nodes, after, invalid: false };
        driver.graphs.captures.insert(id, capture);
        if let Some(stream) = driver.streams.get_mut(&handle) {
            stream.capture = Some((id, 0));
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamEndCapture(stream: u64, out: Out<u64>) -> CuResult {
    enter("cuStreamEndCapture", Need::Context, |driver| {
        let handle = stream::find(driver, "cuStreamEndCapture", stream)?;
        let (id, _) = capture_of(driver, handle).ok_or(ERROR_ILLEGAL_STATE)?;
        let unmatched = driver.graphs.captures.get(&id).is_none_or(|capture| capture.origin != handle);
        if unmatched {
            return Err(ERROR_STREAM_CAPTURE_UNMATCHED);
        }
        for stream in driver.streams.values_mut().filter(|stream| stream.capture.is_some_and(|(c, _)| c == id)) {
            stream.capture = None;
        }
        let capture = driver.graphs.captures.remove(&id).ok_or(ERROR_ILLEGAL_STATE)?;
        if capture.invalid {
            return Err(ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        // Everything captured elsewhere must have come back to the stream that began.
        let mut reached = vec![false; capture.nodes.len()];
        let mut open = capture.after[0].clone();
        while let Some(node) = open.pop() {
            if !std::mem::replace(&mut reached[node], true) {
                open.extend(&capture.nodes[node].after);
            }
        }
        if reached.contains(&false) {
            return Err(ERROR_STREAM_CAPTURE_UNJOINED);
        }
        let graph = driver.new_handle();
        driver.graphs.graphs.insert(graph, Arc::new(capture.nodes));
        out.set(graph)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamIsCapturing(stream: u64, out: Out<u32>) -> CuResult {
    enter("cuStreamIsCapturing", Need::Context, |driver| {
        let handle = stream::find(driver, "cuStreamIsCapturing", stream)?;
        if !stream::captured_implicitly(driver, handle).is_empty() {
            return Err(ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        let invalid =
            capture_of(driver, handle).map(|(id, _)| driver.graphs.captures.get(&id).is_none_or(|c| c.invalid));
        out.set(match invalid {
            None => 0,
            Some(false) => 1,
            Some(true) => 2,
        })
    })
}

fn instantiate(name: &'static str, out: &Out<u64>, graph: u64) -> CuResult {
    enter(name, Need::Context, |driver| {
        let graph = Arc::clone(driver.graphs.graphs.get(&graph).ok_or(ERROR_INVALID_VALUE)?);
        let count = graph.iter().map(|node| node.branch + 1).max().unwrap_or(0);
        let handle = driver.new_handle();
        let branches = (0..count)
            .map(|branch| {
                driver.timelines.push(Timeline::new(format!("branch {branch} of a graph"), 0));
                driver.timelines.len() - 1
            })
            .collect();
        driver.graphs.executables.insert(handle, Executable { graph, branches, last: None });
        out.set(handle)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphInstantiateWithFlags(out: Out<u64>, graph: u64, _flags: u64) -> CuResult {
    instantiate("cuGraphInstantiateWithFlags", &out, graph)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphInstantiate_v2(
    out: Out<u64>,
    graph: u64,
    _node: usize,
    _log: Out<c_char>,
    _len: usize,
) -> CuResult {
    instantiate("cuGraphInstantiate_v2", &out, graph)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphUpload(executable: u64, stream: u64) -> CuResult {
    enter("cuGraphUpload", Need::Context, |driver| {
        stream::find(driver, "cuGraphUpload", stream)?;
        driver.graphs.executables.get(&executable).map(drop).ok_or(ERROR_INVALID_VALUE)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(executable: u64, stream: u64) -> CuResult {
    enter("cuGraphLaunch", Need::Context, |driver| {
        let handle = stream::find(driver, "cuGraphLaunch", stream)?;
        if capture_of(driver, handle).is_some() {
            // Child graphs are not modelled.
            return Err(ERROR_NOT_SUPPORTED);
        }
        let found = driver.graphs.executables.get(&executable).ok_or(ERROR_INVALID_VALUE)?;
        let (graph, branches, last) = (Arc::clone(&found.graph), found.branches.clone(), found.last.clone());
        let timeline = driver.streams.get(&handle).map(|stream| stream.timeline).ok_or(ERROR_INVALID_HANDLE)?;
        if let Some((other, number, clock)) = last {
            stream::wait_for(driver, timeline, other, number, &clock);
        }
        stream::submit(driver, handle, Work::mark("cuGraphLaunch"))?;
        if driver.config.bare {
            return Ok(());
        }
        let base = driver.timelines[timeline].tail.clone();
        let mut clocks: Vec<Clock> = Vec::with_capacity(graph.len());
        for node in graph.iter() {
            let branch = branches[node.branch];
            let number = driver.timelines[branch].submitted + 1;
            let mut clock = base.clone();
            node.after.iter().for_each(|&earlier| clock.join(&clocks[earlier]));
            clock.raise(branch, number);
            let what = format!("{} on {}", node.work.what, driver.timelines[branch].label).into();
            let run = stream::ready(driver, &Op { what, timeline: branch, number }, &clock, &node.work)?;
            driver.timelines[branch].submitted = number;
            stream::push(driver, timeline, run, Some((branch, number)))?;
            clocks.push(clock);
        }
        let submitted = driver.timelines[timeline].submitted;
        for clock in &clocks {
            driver.timelines[timeline].tail.join(clock);
        }
        driver.timelines[timeline].tail.raise(timeline, submitted);
        let tail = driver.timelines[timeline].tail.clone();
        if let Some(executable) = driver.graphs.executables.get_mut(&executable) {
            executable.last = Some((timeline, submitted, tail));
        }
        Ok(())
    })
}

/// Only counts them: nodes have no handles here.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphGetNodes(graph: u64, nodes: usize, count: Out<usize>) -> CuResult {
    enter("cuGraphGetNodes", Need::Context, |driver| {
        let graph = driver.graphs.graphs.get(&graph).ok_or(ERROR_INVALID_VALUE)?;
        if nodes != 0 {
            return Err(ERROR_NOT_SUPPORTED);
        }
        count.set(graph.len())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(graph: u64) -> CuResult {
    enter("cuGraphDestroy", Need::Context, |driver| {
        driver.graphs.graphs.remove(&graph).map(drop).ok_or(ERROR_INVALID_VALUE)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(executable: u64) -> CuResult {
    enter("cuGraphExecDestroy", Need::Context, |driver| {
        driver.graphs.executables.remove(&executable).map(drop).ok_or(ERROR_INVALID_VALUE)
    })
}
