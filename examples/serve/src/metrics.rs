//! What Prometheus scrapes: the server's own counters, and the runtime's at the time of the scrape. A scrape reads
//! counters that nobody waits to change; no pass waits for it.

use std::collections::HashSet;
use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use outcore::Tier;
use outcore_llm::drafts::DraftBy;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::places::Places;

/// How an answer was preempted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preempted {
    /// Its keys and values went to the tiers below.
    Parked,
    /// They are computed again.
    Recomputed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    path: &'static str,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Pooled {
    pooling: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct How {
    how: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct By {
    by: &'static str,
}

impl From<DraftBy> for By {
    fn from(by: DraftBy) -> Self {
        let by = match by {
            DraftBy::Lookup => "lookup",
            DraftBy::SmallModel => "model",
        };
        Self { by }
    }
}

/// The server's own numbers.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<Answered, Counter>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    generated_tokens: Counter,
    embeddings: Family<Pooled, Counter>,
    pooling: Pooled,
    drafted_tokens: Family<By, Counter>,
    accepted_tokens: Family<By, Counter>,
    preemptions: Family<How, Counter>,
    passes: Counter,
    pass_tokens: Counter,
    connections: Gauge,
    waiting: Gauge,
    running: Gauge,
    queued: Histogram,
    first_token: Histogram,
    between_tokens: Histogram,
    pass_time: Histogram,
    pass_waited: Histogram,
    grammar_answers: Counter,
    grammar_compile: Histogram,
    grammar_mask: Histogram,
}

/// From 10 us to about 10 s.
fn short_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.000_01, 2.0, 21))
}

/// From 1 ms to about two minutes.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 1.6, 26))
}

impl Metrics {
    /// With those of the runtime that has these. `pooling` is how embeddings are made.
    pub fn new(places: Arc<Places>, pooling: &'static str) -> Self {
        let mut registry = Registry::with_prefix("outcore");
        let requests = Family::<Answered, Counter>::default();
        registry.register("requests", "Requests answered, by path and status", requests.clone());
        let (embeddings, pooling) = (Family::<Pooled, Counter>::default(), Pooled { pooling });
        registry.register("embeddings", "Texts that were embedded", embeddings.clone());
        // So that it says how before there is one.
        drop(embeddings.get_or_create(&pooling));
        let mut counter = |name: &str, help: &str| {
            let counter = Counter::default();
            registry.register(name, help, counter.clone());
            counter
        };
        let prompt_tokens = counter("prompt_tokens", "Tokens of prompts");
        let cached_tokens = counter("cached_tokens", "Of these, tokens whose keys and values were there");
        let generated_tokens = counter("generated_tokens", "Tokens generated");
        let passes = counter("passes", "Passes over the model");
        let pass_tokens = counter("pass_tokens", "Tokens read in passes");
        let grammar_answers = counter("grammar_answers", "Answers whose form is given by a grammar");
        let by_both = || {
            let family = Family::<By, Counter>::default();
            // So that there is a number before the first draft.
            for by in [DraftBy::Lookup, DraftBy::SmallModel] {
                drop(family.get_or_create(&By::from(by)));
            }
            family
        };
        let [drafted_tokens, accepted_tokens] = [by_both(), by_both()];
        let help = "Tokens drafted, by looking up the prompt and by a draft model";
        registry.register("drafted_tokens", help, drafted_tokens.clone());
        registry.register("accepted_tokens", "Of these, tokens that the model agreed to", accepted_tokens.clone());
        let preemptions = Family::<How, Counter>::default();
        registry.register("preemptions", "Answers that had to make room for others", preemptions.clone());
        let mut gauge = |name: &str, help: &str| {
            let gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        };
        let connections = gauge("connections", "Open connections");
        let waiting = gauge("waiting_answers", "Answers that wait for their turn");
        let running = gauge("running_answers", "Answers that are read or written");
        let mut histogram = |name: &str, help: &str| {
            let histogram = seconds();
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
            histogram
        };
        let queued = histogram("queued", "From a request to its turn");
        let first_token = histogram("time_to_first_token", "From a request to its first token");
        let between_tokens = histogram("time_between_tokens", "From a token of an answer to the next one");
        let pass_time = histogram("pass", "What a pass took");
        let pass_waited = histogram("pass_waited", "Of that, waiting for weights");
        let mut short = |name: &str, help: &str| {
            let histogram = short_seconds();
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
            histogram
        };
        let grammar_compile = short("grammar_compile", "What compiling a grammar took");
        let grammar_mask = short("grammar_mask", "What finding the tokens took that a grammar allows next");
        registry.register_collector(Box::new(Engine(places)));
        Self {
            registry,
            requests,
            prompt_tokens,
            cached_tokens,
            generated_tokens,
            embeddings,
            pooling,
            drafted_tokens,
            accepted_tokens,
            preemptions,
            passes,
            pass_tokens,
            connections,
            waiting,
            running,
            queued,
            first_token,
            between_tokens,
            pass_time,
            pass_waited,
            grammar_answers,
            grammar_compile,
            grammar_mask,
        }
    }

    /// All of it, in the text format of OpenMetrics.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        if encode(&mut text, &self.registry).is_err() {
            let _ = writeln!(text, "# EOF");
        }
        text
    }

    /// All of it, in Prometheus's own text format (version 0.0.4), which has no units and no end, and in which the type
    /// of a counter is that of the name with its suffix:
    /// <https://prometheus.io/docs/instrumenting/exposition_formats/>.
    pub fn plain_text(&self) -> String {
        in_plain_text(&self.text())
    }

    /// A request was answered.
    pub fn answered(&self, path: &'static str, status: u16) {
        self.requests.get_or_create(&Answered { path, status }).inc();
    }

    /// A connection was opened. It counts until what is returned is dropped.
    pub fn connection(&self) -> impl Drop + Send + use<> {
        struct Open(Gauge);
        impl Drop for Open {
            fn drop(&mut self) {
                self.0.dec();
            }
        }
        self.connections.inc();
        Open(self.connections.clone())
    }

    pub(crate) fn load(&self, waiting: usize, running: usize) {
        self.waiting.set(waiting as i64);
        self.running.set(running as i64);
    }

    pub(crate) fn begun(&self, prompt: usize, cached: usize, queued: Duration) {
        self.prompt_tokens.inc_by(prompt as u64);
        self.cached_tokens.inc_by(cached as u64);
        self.queued.observe(queued.as_secs_f64());
    }

    pub(crate) fn token(&self, received: Instant, last: Option<Instant>, now: Instant) {
        self.generated_tokens.inc();
        match last {
            None => self.first_token.observe(now.duration_since(received).as_secs_f64()),
            Some(last) => self.between_tokens.observe(now.duration_since(last).as_secs_f64()),
        }
    }

    pub(crate) fn embedded(&self) {
        self.embeddings.get_or_create(&self.pooling).inc();
    }

    pub(crate) fn pass(&self, tokens: usize, took: Duration, waited: Duration) {
        self.passes.inc();
        self.pass_tokens.inc_by(tokens as u64);
        self.pass_time.observe(took.as_secs_f64());
        self.pass_waited.observe(waited.as_secs_f64());
    }

    pub(crate) fn drafted(&self, by: DraftBy, drafted: usize, right: usize) {
        self.drafted_tokens.get_or_create(&By::from(by)).inc_by(drafted as u64);
        self.accepted_tokens.get_or_create(&By::from(by)).inc_by(right as u64);
    }

    /// A grammar was compiled, or refused, for so many answers.
    pub(crate) fn grammar(&self, took: Duration, answers: usize) {
        self.grammar_compile.observe(took.as_secs_f64());
        self.grammar_answers.inc_by(answers as u64);
    }

    pub(crate) fn mask(&self, took: Duration) {
        self.grammar_mask.observe(took.as_secs_f64());
    }

    pub(crate) fn preempted(&self, how: Preempted) {
        let how = match how {
            Preempted::Parked => "parked",
            Preempted::Recomputed => "recomputed",
        };
        self.preemptions.get_or_create(&How { how }).inc();
    }
}

/// The runtime and the pool, as they are when asked.
#[derive(Debug)]
struct Engine(Arc<Places>);

impl Engine {
    fn pages(&self) -> Values {
        let of_class = |(class, tiers): (&'static str, Vec<Tier>)| {
            Tier::ALL.map(|tier| {
                let labels = vec![("class", class.to_owned()), ("tier", tier.name().to_owned())];
                (labels, tiers.iter().filter(|have| **have == tier).count() as u64)
            })
        };
        self.0.pages().into_iter().flat_map(of_class).collect()
    }
}

impl Collector for Engine {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let (stats, kv) = (self.0.pool().runtime().stats(), self.0.pool().stats());
        let tenants: Vec<_> =
            self.0.pool().tenants().into_iter().map(|id| (id, self.0.pool().tenant_stats(id))).collect();
        let mut write = Encoder(&mut encoder);
        let one = |value: u64| vec![(Vec::new(), value)];
        let of = |label: &'static str, value: &str| vec![(label, value.to_owned())];
        let gauges = [
            ("device_budget_bytes", "The device budget", one(stats.device.budget.get())),
            ("device_used_bytes", "Device memory in frames", one(stats.device.used.get())),
            ("host_used_bytes", "Host-tier memory in frames", one(stats.host.used.get())),
            ("pages", "Pages by class of tensors and the fastest tier that has them", self.pages()),
            (
                "kv_blocks",
                "Blocks of keys and values",
                vec![
                    (of("state", "used"), kv.used.into()),
                    (of("state", "cached"), kv.cached.into()),
                    (of("state", "free"), (kv.blocks - kv.used - kv.cached).into()),
                ],
            ),
            (
                "kv_blocks_let_go",
                "Blocks without the room of layers whose windows have left them",
                one(kv.let_go.into()),
            ),
            ("kv_active_blocks", "Blocks of permits", one(kv.active.into())),
            ("kv_active_blocks_most", "The most blocks of permits", one(kv.active_most.into())),
            (
                "tenant_active_blocks",
                "Blocks of permits by tenant",
                tenants.iter().map(|(id, stats)| (of("tenant", &id.get().to_string()), stats.active.into())).collect(),
            ),
        ];
        for (name, help, values) in gauges {
            write.gauge(name, help, values)?;
        }
        let traffic = &stats.traffic;
        let counters = [
            ("page_uses", "Uses of pages", one(stats.pager.uses)),
            ("page_hits", "Uses of pages that were there", one(stats.pager.hits)),
            ("evictions", "Pages that went", one(stats.pager.evictions)),
            (
                "link_bytes",
                "Bytes moved, by link",
                vec![
                    (of("link", "disk_read"), traffic.disk_read.get()),
                    (of("link", "disk_written"), traffic.disk_written.get()),
                    (of("link", "device_in"), traffic.link_in.get()),
                    (of("link", "device_out"), traffic.link_out.get()),
                ],
            ),
            (
                "stalls",
                "Waits for pages, by cause",
                stats.stalls.iter().map(|stall| (of("cause", stall.name), stall.count)).collect(),
            ),
            (
                "stall_microseconds",
                "How long these took together",
                stats.stalls.iter().map(|stall| (of("cause", stall.name), stall.time.as_micros() as u64)).collect(),
            ),
            ("kv_blocks_asked", "Whole blocks with which sequences began", one(kv.asked)),
            ("kv_blocks_found", "Of these, blocks that were there", one(kv.found)),
            ("kv_blocks_restored", "Blocks that were read from the store", one(kv.read)),
        ];
        for (name, help, values) in counters {
            write.counter(name, help, values)?;
        }
        Ok(())
    }
}

struct Encoder<'a, 'b>(&'a mut DescriptorEncoder<'b>);

/// Values by their labels.
type Values = Vec<(Vec<(&'static str, String)>, u64)>;

impl Encoder<'_, '_> {
    fn gauge(&mut self, name: &str, help: &str, values: Values) -> std::fmt::Result {
        let kind = ConstGauge::new(0u64).metric_type();
        let mut family = self.0.encode_descriptor(name, help, None, kind)?;
        for (labels, value) in values {
            ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn counter(&mut self, name: &str, help: &str, values: Values) -> std::fmt::Result {
        let kind = ConstCounter::new(0u64).metric_type();
        let mut family = self.0.encode_descriptor(name, help, None, kind)?;
        for (labels, value) in values {
            ConstCounter::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
/// From OpenMetrics, in which what a name is comes before its help and its values.
fn in_plain_text(text: &str) -> String {
    let counters: HashSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    let mut plain = String::with_capacity(text.len());
    for line in text.lines() {
        let said = line.strip_prefix("# ").and_then(|rest| rest.split_once(' '));
        match said {
            Some(("UNIT", _)) => continue,
            Some((what @ ("TYPE" | "HELP"), rest)) => {
                let (name, rest) = rest.split_once(' ').unwrap_or((rest, ""));
                let suffix = if counters.contains(name) { "_total" } else { "" };
                // Writing to a string does not fail.
                let _ = writeln!(plain, "# {what} {name}{suffix} {rest}");
            }
            _ if line == "# EOF" => {}
            _ => {
                plain.push_str(line);
                plain.push('\n');
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_called_by_their_whole_name_in_plain_text() {
        let text = "# HELP a What a counts.\n# TYPE a counter\n# UNIT a seconds\na_total{b=\"# TYPE x\"} 1\n\
                    # HELP g Now.\n# TYPE g gauge\ng 2\n# EOF\n";
        let plain = "# HELP a_total What a counts.\n# TYPE a_total counter\na_total{b=\"# TYPE x\"} 1\n\
                     # HELP g Now.\n# TYPE g gauge\ng 2\n";
        assert_eq!(in_plain_text(text), plain);
    }
}
