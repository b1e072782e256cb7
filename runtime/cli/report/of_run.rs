//! The parts of a run of `generate`.

use super::super::output::size;
use super::input::{Generated, Inputs};
use super::part::{self, Cell, Link, Part, RUN, seconds};

/// Returns all parts of a run. `of` is added to titles to tell it from other runs.
pub fn parts(run: &Generated, inputs: &Inputs, of: &str) -> Vec<Part> {
    let all = run.stalls.iter().map(|(cause, stall)| (cause.clone(), stall.count, stall.seconds));
    let whole = run.compute_s + run.stall_s;
    let stalls = part::causes(format!("Stalls by cause{of}"), all.collect(), whole, "the time in passes");
    let title = format!("Hit ratio beside the optimum{of}");
    let optimum = part::beside_optimum(title, run.ratio_uses, &run.policy, run.hit_ratio, run.opt_hit_ratio);
    let mut parts = vec![summary(run, of), stalls, links(run, inputs, of), optimum, memory(run, of)];
    let weights = run.memory.as_ref().map_or(&[][..], |memory| &memory.weights);
    parts.extend(part::weights(format!("Weights by class{of}"), weights));
    parts
}

fn summary(run: &Generated, of: &str) -> Part {
    let mut rows = Vec::new();
    let mut pair = |name: &str, value: String| rows.push(vec![Cell::left(name), Cell::left(value)]);
    pair("model", run.model.clone());
    pair("device, reads by", format!("{}, {}", run.device, run.io));
    pair("device budget, host budget", format!("{}, {}", size(run.device_budget_bytes), size(run.host_budget_bytes)));
    pair("page, policy", format!("{}, {}", size(run.page_bytes), run.policy));
    pair("tokens", format!("{} in, {} out", run.prompt_tokens.len(), run.tokens.len()));
    pair("first token after", seconds(run.ttft_s));
    pair("tokens a second", format!("{:.2}", run.decode_tok_s));
    pair("median pass", seconds(run.pass_s_median));
    pair("computing, waiting", format!("{}, {}", seconds(run.compute_s), seconds(run.stall_s)));
    pair("transfers hidden behind compute", format!("{:.1} %", 100.0 * run.overlap));
    let notes = run.interrupted.then(|| "The run was interrupted.".to_owned()).into_iter().collect();
    Part { kind: RUN, title: format!("The run{of}"), notes, rows, ..Part::default() }
}

/// The disk's ceiling as a probe found it, if there is one, and what is said of it.
pub fn probed(inputs: &Inputs) -> (Option<u64>, String) {
    let probed = inputs.probed.iter().flat_map(|probed| probed.points.iter().map(move |point| (probed, point)));
    let probed = probed.filter(|(_, point)| point.bytes_per_second > 0).max_by_key(|(_, point)| point.bytes_per_second);
    let note = match probed {
        Some((probed, point)) => format!(
            "The disk's ceiling is what `outcore probe` read of {}: blocks of {}, {} at a time.",
            probed.file,
            size(point.block_bytes),
            point.depth
        ),
        None => "The disk's ceiling is not known: run `outcore probe --json --file MODEL > probe.json` on the run's \
                 machine, and give that file with `--probe`."
            .to_owned(),
    };
    (probed.map(|(_, point)| point.bytes_per_second), note)
}

fn links(run: &Generated, inputs: &Inputs, of: &str) -> Part {
    let mut notes = vec!["A link's bandwidth is its bytes over the time in which it had work.".to_owned()];
    let disk = match run.ceiling.disk_bytes_per_second {
        Some(rate) => {
            notes.push("The disk's ceiling is what the run's JSON says.".to_owned());
            Some(rate.get())
        }
        None => {
            let (ceiling, note) = probed(inputs);
            notes.push(note);
            ceiling
        }
    };
    let copied = inputs.probed.iter().map(|probed| probed.memcpy_bytes_per_second).max().filter(|rate| *rate > 0);
    // On the host device, both ends of the link are memory of the process.
    let on_host = run.device == "host";
    let link = match (run.ceiling.link_bytes_per_second, copied.filter(|_| on_host)) {
        (Some(rate), _) => {
            notes.push("The link's ceiling is what the run's JSON says.".to_owned());
            Some(rate.get())
        }
        (None, Some(rate)) => {
            notes.push("The link's ceiling is what one thread copied of memory for `outcore probe`.".to_owned());
            Some(rate)
        }
        // A link that carries nothing needs no ceiling.
        (None, None) if run.link_bytes == 0 => None,
        (None, None) => {
            notes.push(if on_host {
                "The link's ceiling is not known: give `--probe`, whose memory copies are the most it can do."
                    .to_owned()
            } else {
                "The link's ceiling is not known: add \"ceiling\": {\"link_bytes_per_second\": N}, as it was measured, \
                 to the run's JSON."
                    .to_owned()
            });
            None
        }
    };
    let float = |rate: Option<u64>| rate.map(|rate| rate as f64);
    let moved = run.disk_read_bytes.saturating_add(run.disk_written_bytes);
    let all = [
        Link { name: "disk", bytes: moved, busy: run.disk_busy_s, ceiling: float(disk) },
        Link { name: "link to the device", bytes: run.link_bytes, busy: run.link_busy_s, ceiling: float(link) },
    ];
    part::links(format!("Bandwidth by link{of}"), notes, &all, run.compute_s + run.stall_s)
}

fn memory(run: &Generated, of: &str) -> Part {
    let room = |bytes: u64| Some(bytes).filter(|bytes| *bytes > 0);
    let mut classes = vec![
        ("weights, in frames of the device".to_owned(), Some(run.peak_device_bytes), room(run.device_budget_bytes)),
        ("weights, in frames of the host".to_owned(), Some(run.peak_host_bytes), room(run.host_budget_bytes)),
    ];
    // On the host device, its frames are memory of the process, like the host tier's.
    let on_host = run.device == "host";
    let mut in_process = run.peak_host_bytes.saturating_add(if on_host { run.peak_device_bytes } else { 0 });
    let mut notes = vec![
        "Frames: the most at one time. Keys and values: for all tokens asked for. Activations: as budgeted.".to_owned(),
    ];
    match &run.memory {
        Some(memory) => {
            classes.push(("keys and values".to_owned(), Some(memory.keys_values_bytes), None));
            classes.push(("activations, logits, threads".to_owned(), Some(memory.activations_bytes), None));
            if on_host {
                in_process =
                    in_process.saturating_add(memory.keys_values_bytes).saturating_add(memory.activations_bytes);
            }
        }
        None => notes.push(
            "Keys, values and activations are in the rest: this run's JSON is of an earlier release, which did not \
             report them."
                .to_owned(),
        ),
    }
    classes.push(("the rest of the process".to_owned(), Some(run.peak_rss_bytes.saturating_sub(in_process)), None));
    let tails = run.memory.as_ref().map(|memory| memory.tail_bytes);
    let files = run
        .memory
        .as_ref()
        .map(|memory| memory.weights.iter().map(|class| class.bytes).fold(memory.tail_bytes, u64::saturating_add));
    notes.push(part::waste(tails, files));
    part::memory(format!("Memory by class{of}"), notes, &classes)
}
