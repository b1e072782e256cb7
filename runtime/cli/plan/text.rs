//! The result of `outcore plan`, as tables.

use outcore::Bytes;
use outcore_lab::planning::{Bottleneck, Parameters};

use super::super::here::Source;
use super::super::output::{Side, Table, digits, percent, printable, rate, size};
use super::super::printed::Report;
use super::found::{ChangeReport, PassReport, Plan, ShapeReport};

/// Formats a large number with the prefix of its unit.
fn thousands(n: f64) -> String {
    let prefixes = [(1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")];
    let (scale, prefix) = prefixes.into_iter().find(|(scale, _)| n >= *scale).unwrap_or((1.0, ""));
    format!("{} {prefix}", digits(n / scale))
}

fn bottleneck(pass: &PassReport) -> &'static str {
    pass.bottleneck.map_or("all else", Bottleneck::name)
}

fn time(seconds: f64) -> String {
    if seconds >= 1.0 { format!("{} s", digits(seconds)) } else { format!("{} ms", digits(seconds * 1e3)) }
}

impl Plan {
    fn training(&self) -> bool {
        self.job.work == "train"
    }

    fn pass_name(&self) -> &'static str {
        if self.training() { "step" } else { "pass" }
    }

    fn facts(&self) -> Table {
        let mut facts = Table::pairs();
        let ShapeReport { sizes: shape, experts } = &self.shape;
        let parameters =
            Parameters::new(shape.parameters).map_or_else(|_| shape.parameters.to_string(), |n| n.to_string());
        let what = match (&self.model.file, self.model.format) {
            (Some(model), Some(format)) => {
                format!("{}: {format}, {parameters} parameters, {}", printable(model), shape.dtype)
            }
            _ => format!("{parameters} parameters, {}", shape.dtype),
        };
        facts.pair("model", what);
        facts.pair(
            "shape",
            format!(
                "{} layers of {}, {} heads ({} of keys and values), feed-forward {}{}, vocabulary {}",
                shape.layers,
                shape.hidden,
                shape.heads,
                shape.kv_heads,
                shape.ffn,
                if shape.gated { " gated" } else { "" },
                shape.vocab
            ),
        );
        if let Some(experts) = experts {
            let active = Parameters::new(experts.active_parameters)
                .map_or_else(|_| experts.active_parameters.to_string(), |n| n.to_string());
            facts.pair(
                "experts",
                format!(
                    "{} a layer, {} for each token, which uses {active} parameters; evenly drawn, a {} uses {} of them",
                    experts.sizes.count,
                    experts.sizes.active,
                    self.pass_name(),
                    digits(experts.used_per_pass)
                ),
            );
        }
        let job = &self.job;
        let how = match (job.kv, job.optimizer, job.checkpointing) {
            (Some(kv), ..) => format!("keys and values in {kv}"),
            (_, Some(optimizer), Some("none")) => format!("{optimizer}, no checkpointing"),
            (_, Some(optimizer), Some("layers")) => format!("{optimizer}, a layer at a time"),
            (_, Some(optimizer), Some(checkpointing)) => format!("{optimizer}, {checkpointing} checkpointing"),
            _ => String::new(),
        };
        let work = if self.training() { "training" } else { "inference" };
        facts.pair("job", format!("{work}, context {}, batch {}, {how}", job.context, job.batch));
        facts.pair("resources", self.resources_text());
        for (at, source) in self.sources_text().into_iter().enumerate() {
            facts.pair(if at == 0 { "from" } else { "" }, source);
        }
        for (at, assumed) in self.assumed.iter().enumerate() {
            facts.pair(if at == 0 { "assumed" } else { "" }, assumed.as_str());
        }
        facts
    }

    fn resources_text(&self) -> String {
        let resources = &self.resources;
        let (read, write) = (resources.disk_bytes_per_second, resources.disk_write_bytes_per_second);
        let mut parts = vec![
            format!("{} device memory", size(resources.device_bytes)),
            format!("{} host memory", size(resources.host_bytes)),
            format!("disk {}", rate(read)),
        ];
        if write != read {
            parts.push(format!("which writes {}", rate(write)));
        }
        parts.extend(resources.link_bytes_per_second.map(|link| format!("link {}", rate(link))));
        parts.extend(resources.memory_bytes_per_second.map(|memory| format!("computing at {}", rate(memory))));
        parts.extend(resources.flops_per_second.map(|flops| format!("{}FLOP/s", thousands(flops as f64))));
        let machine = resources.machine.as_ref().map_or_else(String::new, |name| format!("{}: ", printable(name)));
        machine + &parts.join(", ")
    }

    /// Returns a line for each source of the resources.
    fn sources_text(&self) -> Vec<String> {
        let sources = self.resources.sources.chunk_by(|one, other| one.from == other.from);
        let line = |of_one: &[Source]| {
            let what: Vec<_> = of_one.iter().map(|source| source.what).collect();
            of_one.first().map(|source| format!("{}: {}", what.join(", "), printable(&source.from)))
        };
        sources.filter_map(line).collect()
    }

    /// Returns a table of activations by checkpointing setting; none for inference.
    fn settings(&self) -> Option<Table> {
        let settings = self.memory.activations_by_checkpointing.as_ref()?;
        let mut table = Table::new(&[("checkpointing", Side::Left), ("activations", Side::Right), ("", Side::Left)]);
        for setting in settings {
            table.row([
                setting.checkpointing.to_owned(),
                setting.bytes.map_or_else(|| format!("over {}", size(u64::MAX)), size),
                if setting.chosen { "chosen".to_owned() } else { String::new() },
            ]);
        }
        Some(table)
    }

    fn classes(&self) -> Table {
        let mut classes = Table::new(&[("memory", Side::Left), ("size", Side::Right), ("share", Side::Right)]);
        let memory = &self.memory;
        for (class, bytes) in [
            ("weights", memory.weights_bytes),
            ("keys and values", memory.kv_bytes),
            ("activations", memory.activations_bytes),
            ("gradients", memory.gradients_bytes),
            ("optimizer", memory.optimizer_bytes),
            ("scratch", memory.scratch_bytes),
            ("headroom", memory.headroom_bytes),
            ("in all", memory.total_bytes),
        ] {
            if bytes > 0 {
                classes.row([class.to_owned(), size(bytes), percent(bytes, memory.total_bytes)]);
            }
        }
        classes
    }

    fn moves(&self, pass: &PassReport) -> Table {
        let title = format!("each {}", self.pass_name());
        let mut moves = Table::new(&[(title.as_str(), Side::Left), ("bytes", Side::Right), ("time", Side::Right)]);
        let unknown = || "not known".to_owned();
        let both = |up: Bytes, down: Bytes| match (size(up.get()), down) {
            (up, Bytes::ZERO) => up,
            (up, down) => format!("{up} up, {} down", size(down.get())),
        };
        let computed = match pass.compute_from {
            Some("machine") => {
                format!("{} used, {}FLOP", size(pass.traffic_bytes as u64), thousands(pass.flops))
            }
            _ => String::new(),
        };
        let compute = pass.compute_by.map_or_else(|| "compute".to_owned(), |by| format!("compute, by {by}"));
        moves.row([compute, computed, pass.compute_s.map_or_else(unknown, time)]);
        if let Some(seconds) = pass.link_s {
            moves.row(["link".to_owned(), both(pass.paged.filled, pass.paged.copied_down), time(seconds)]);
        }
        moves.row(["disk".to_owned(), both(pass.paged.disk_read, pass.paged.disk_written), time(pass.disk_s)]);
        // What is above overlaps. These two add up to the pass.
        let computing = pass.pass_s.zip(pass.waited_s).map(|(pass, waited)| pass - waited);
        moves.row(["computing, with steps".to_owned(), String::new(), computing.map_or_else(unknown, time)]);
        moves.row(["waiting for pages".to_owned(), String::new(), pass.waited_s.map_or_else(unknown, time)]);
        moves.row([format!("the whole {}", self.pass_name()), String::new(), pass.pass_s.map_or_else(unknown, time)]);
        moves
    }

    /// Says where the pages are that have no frame on the device.
    fn places(&self, pass: &PassReport) -> String {
        let [streamed, paged, in_host] =
            [pass.paged.streamed, pass.paged.all, pass.paged.in_host].map(|bytes| size(bytes.get()));
        let name = self.pass_name();
        if pass.paged.ahead {
            return format!(
                "{streamed} of the {paged} that a {name} uses stream, {in_host} of them from the host's memory"
            );
        }
        let [used, filled] = [pass.paged.used, pass.paged.filled].map(|bytes| size(bytes.get()));
        format!(
            "{streamed} of {paged} have no frame on the device, {in_host} of them are in the host's memory; a {name} \
             uses {used} and fills {filled} of pages, if experts are drawn evenly"
        )
    }

    /// Says in a line how fast it is.
    fn speed(&self, pass: &PassReport) -> String {
        let name = self.pass_name();
        match (pass.pass_s, pass.tokens_per_s, pass.bottleneck) {
            (Some(seconds), Some(tokens), Some(bottleneck)) => {
                let at_most = if pass.compute_from == Some("given") { "" } else { "at most, " };
                format!(
                    "{} a {name} of {} token{}: {at_most}{} tok/s, bound by {bottleneck}",
                    time(seconds),
                    pass.tokens,
                    if pass.tokens == 1 { "" } else { "s" },
                    digits(tokens)
                )
            }
            _ if self.fit == "resident" => {
                "nothing moves: as fast as it computes (--machine or --compute says how fast)".to_owned()
            }
            _ => "pages move between host and device memory only, as fast as memory copies".to_owned(),
        }
    }

    fn ways(title: &str, changes: &[ChangeReport]) -> Table {
        let mut table =
            Table::new(&[(title, Side::Left), ("speed", Side::Right), ("tok/s", Side::Right), ("", Side::Left)]);
        for change in changes {
            table.row([
                change.change.clone(),
                change.speedup.map_or_else(|| "-".to_owned(), |speedup| format!("{}x", digits(speedup))),
                change.tokens_per_s.map_or_else(|| "-".to_owned(), digits),
                if change.fit == "resident" { "nothing moves".to_owned() } else { String::new() },
            ]);
        }
        table
    }
}

impl Report for Plan {
    fn text(&self) -> String {
        let mut text = format!("{}\n{}\n", self.facts().text(), self.classes().text());
        if let Some(settings) = self.settings() {
            text += &format!("{}\n", settings.text());
        }
        let mut verdict = Table::pairs();
        let device = size(self.resources.device_bytes);
        match (&self.recommended, &self.pass) {
            (Some(recommended), Some(pass)) => {
                if self.fit == "resident" {
                    verdict.pair("fits", format!("yes, in {device} of device memory"));
                } else {
                    verdict.pair("fits", format!("no: {}", self.places(pass)));
                }
                if pass.paged.kv {
                    verdict.pair("", "keys and values are paged too: there is no room for them");
                }
                verdict.pair("speed", self.speed(pass));
                if pass.compute_from == Some("machine") {
                    verdict.pair("", "computing as fast as the machine can; kernels are slower");
                }
                if !pass.paged.ahead {
                    verdict.pair("", "which experts come next is not known: computing waits for missing pages");
                }
                if let Some(beside) = pass.beside {
                    verdict.pair("", format!("{beside} takes more than half as long as {}", bottleneck(pass)));
                }
                verdict.pair(
                    "budgets",
                    format!(
                        "device {}, host {}, pages of {}, lookahead {}",
                        size(recommended.device_budget.get()),
                        size(recommended.host_budget.get()),
                        size(recommended.page_size.bytes()),
                        size(recommended.lookahead.get())
                    ),
                );
                verdict.pair("policy", format!("{}: {}", recommended.policy, recommended.policy_because));
                if recommended.scratch_file > Bytes::ZERO {
                    verdict.pair("scratch file", format!("{} on disk", size(recommended.scratch_file.get())));
                }
                text += &verdict.text();
                text += &format!("\n{}", self.moves(pass).text());
            }
            _ => {
                verdict.pair(
                    "fits",
                    format!(
                        "no, and does not run: what cannot be paged takes {} of device memory, and there are {device}",
                        size(self.least_device_bytes)
                    ),
                );
                text += &verdict.text();
            }
        }
        if !self.changes.is_empty() {
            text += &format!("\n{}", Self::ways("one change", &self.changes).text());
        }
        if let Some(target) = &self.target {
            let wanted = digits(target.tokens_per_s);
            text += &match target.reached {
                Some(true) if self.pass.as_ref().is_some_and(|pass| pass.compute_from == Some("machine")) => {
                    format!("\n  {wanted} tok/s are within what the machine can\n")
                }
                Some(true) => format!("\n  {wanted} tok/s are reached\n"),
                None => format!(
                    "\n  no move stands in the way of {wanted} tok/s; computing is not known (--machine, --compute)\n"
                ),
                Some(false) if target.ways.is_empty() => {
                    format!("\n  {wanted} tok/s are not reached, and no single change would do it\n")
                }
                Some(false) => {
                    let title = format!("to reach {wanted} tok/s");
                    format!("\n{}", Self::ways(&title, &target.ways).text())
                }
            };
        }
        text
    }
}
