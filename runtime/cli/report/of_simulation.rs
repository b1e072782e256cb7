//! The parts of a simulation.

use outcore::Bytes;

use super::super::output::size;
use super::input::{Simulated, SimulatedStall};
use super::part::{self, Cell, Link, Part, SIMULATED, ratio, seconds};

/// Returns all parts except its timeline. `at` is its number on the page.
pub fn parts(simulated: &Simulated, at: usize) -> Vec<Part> {
    let name = simulated.name();
    let named = |stall: &SimulatedStall| (format!("{}, {}", stall.cause, stall.tier), stall.count, stall.seconds);
    let whole = simulated.total_s * simulated.devices as f64;
    let causes = simulated.stalls.iter().map(named).collect();
    let stalls = part::causes(format!("Stalls by cause: {name}"), causes, whole, "the time of all devices");
    let mut parts = vec![summary(simulated, at), stalls, links(simulated, &name)];
    parts.extend(simulated.timeline.as_ref().map(|timeline| {
        let (uses, hits, optimum) = (timeline.ratio_uses, timeline.hit_ratio, timeline.opt_hit_ratio);
        part::beside_optimum(format!("Hit ratio beside the optimum: {name}"), uses, &simulated.policy, hits, optimum)
    }));
    parts.push(memory(simulated, &name));
    parts.extend(part::weights(format!("Weights by class: {name}"), &simulated.weights));
    parts
}

fn summary(simulated: &Simulated, at: usize) -> Part {
    let mut rows = Vec::new();
    let mut pair = |name: &str, value: String| rows.push(vec![Cell::left(name), Cell::left(value)]);
    pair("model", format!("{}, {}", simulated.model, size(simulated.model_bytes)));
    pair("machine, devices", format!("{}, {}", simulated.machine, simulated.devices));
    pair("page, policy", format!("{}, {}", size(simulated.page_bytes), simulated.policy));
    let tiers = [simulated.frames, simulated.host_frames];
    let [device, host] = tiers.map(|frames| size(frames.saturating_mul(simulated.page_bytes)));
    pair("memory for pages: each device, the host for each device", format!("{device}, {host}"));
    pair("first pass, median of the others", [simulated.first_pass_s, simulated.median_pass_s].map(seconds).join(", "));
    pair("hit ratio", ratio(simulated.hit_ratio));
    let mut notes =
        vec!["A forecast: the runtime's pager under a virtual clock, on a machine that is only described.".to_owned()];
    if simulated.timeline.is_none() {
        notes.push(
            "To see lanes, where pages were, and the best possible hits, simulate with `--json --timeline`.".to_owned(),
        );
    }
    Part {
        kind: SIMULATED,
        title: simulated.name(),
        notes,
        chart: Some(format!("simulated-{at}")),
        rows,
        ..Part::default()
    }
}

fn links(simulated: &Simulated, name: &str) -> Part {
    let ceiling = simulated.ceiling.as_ref();
    let all = [
        ("disk, read", &simulated.disk_read, ceiling.map(|of| of.disk_read_bytes_per_second)),
        ("disk, written", &simulated.disk_written, ceiling.map(|of| of.disk_write_bytes_per_second)),
        ("host to device", &simulated.link_in, ceiling.and_then(|of| of.link_bytes_per_second)),
        ("device to host", &simulated.link_out, ceiling.and_then(|of| of.link_bytes_per_second)),
        ("compute", &simulated.compute, ceiling.map(|of| of.compute_bytes_per_second)),
    ];
    // A machine without a link needs no rows for it.
    let linked = all.iter().any(|(name, flow, _)| name.contains("device") && flow.bytes > Bytes::ZERO)
        || ceiling.is_none_or(|of| of.link_bytes_per_second.is_some());
    let rows = all.into_iter().filter(|(name, ..)| linked || !name.contains("device"));
    let rows: Vec<Link> = rows
        .map(|(name, flow, ceiling)| Link {
            name,
            bytes: flow.bytes.get(),
            busy: Some(flow.busy.as_secs_f64()),
            ceiling: ceiling.map(|rate| rate.get() as f64),
        })
        .collect();
    let notes = match ceiling {
        Some(_) => vec!["Ceilings are those of the machine's description, of all devices together.".to_owned()],
        None => vec!["Ceilings are not known: simulate again with this release, whose JSON has them.".to_owned()],
    };
    part::links(format!("Bandwidth by link: {name}"), notes, &rows, simulated.total_s)
}

fn memory(simulated: &Simulated, name: &str) -> Part {
    let bytes = |frames: u64| frames.saturating_mul(simulated.page_bytes);
    let room = |frames: u64| Some(bytes(frames)).filter(|bytes| *bytes > 0);
    let timeline = simulated.timeline.as_ref();
    let classes = [
        ("weights, in frames of a device", timeline.map(|of| bytes(of.peak_device_frames)), room(simulated.frames)),
        (
            "weights, in frames of the host for it",
            timeline.map(|of| bytes(of.peak_host_frames)),
            room(simulated.host_frames),
        ),
    ];
    let classes = classes.map(|(name, used, room)| (name.to_owned(), used, room));
    let mut notes = vec!["Keys, values and activations are not simulated.".to_owned()];
    if timeline.is_none() {
        notes.push("Frames in use are not known: simulate with `--json --timeline`.".to_owned());
    }
    let pages = simulated.tail_bytes.map(|tails| simulated.model_bytes.saturating_add(tails));
    notes.push(part::waste(simulated.tail_bytes, pages));
    part::memory(format!("Memory by class: {name}"), notes, &classes)
}
