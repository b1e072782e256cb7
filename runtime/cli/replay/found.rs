//! What a replay found: its counts, and how they are shown.

use std::time::Duration;

use outcore::Bytes;
use outcore_lab::sim::ServerRequest;
use serde::Serialize;

use super::{Served, Setup};
use crate::output::{Side, Table, percent, size};
use crate::printed::Report;

/// Where blocks were found. `disk` is the runtime's scratch file.
pub const TIERS: [&str; 4] = ["device", "host", "disk", "store"];
const STORE: usize = 3;

/// What a server says when all requests have ended.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ended {
    pub evictions: u64,
    pub scratch_written: u64,
    pub store_written: u64,
    pub store_evicted: u64,
    /// Bytes a second of each tier, where they were measured.
    pub rates: [Option<u64>; 4],
}

/// Sums over requests.
#[derive(Debug)]
pub struct Tally {
    pub requests: u64,
    block_tokens: u64,
    prefill_rate: f64,
    too_large: u64,
    first_too_large: Option<String>,
    asked: u64,
    tokens: u64,
    found_tokens: u64,
    blocks: [u64; 4],
    bytes: [u64; 4],
    /// Seconds that requests waited, and their bytes by tier, by the slowest tier that had some of these.
    restores: [Vec<(f64, [u64; 4])>; 4],
    saved: f64,
    slower: u64,
}

impl Tally {
    pub fn new(setup: &Setup<'_>) -> Self {
        Self {
            requests: 0,
            block_tokens: setup.layout.block_tokens().into(),
            prefill_rate: setup.options.prefill_rate,
            too_large: 0,
            first_too_large: None,
            asked: 0,
            tokens: 0,
            found_tokens: 0,
            blocks: [0; 4],
            bytes: [0; 4],
            restores: Default::default(),
            saved: 0.0,
            slower: 0,
        }
    }

    /// Blocks that were asked for.
    pub fn asked(&self) -> u64 {
        self.asked
    }

    pub fn too_large(&mut self, request: &ServerRequest, why: String) {
        self.too_large += 1;
        self.first_too_large.get_or_insert_with(|| format!("line {}: {why}", request.line));
    }

    /// A request with a prompt of so many tokens was served.
    pub fn served(&mut self, tokens: u64, served: &Served) {
        let Served { blocks, bytes, restore } = served;
        self.tokens += tokens;
        // The last token is always computed.
        self.asked += tokens.saturating_sub(1) / self.block_tokens;
        for tier in 0..TIERS.len() {
            self.blocks[tier] += blocks[tier];
            self.bytes[tier] += bytes[tier];
        }
        let found = blocks.iter().sum::<u64>() * self.block_tokens;
        self.found_tokens += found;
        let (spared, restore) = (found as f64 / self.prefill_rate, restore.as_secs_f64());
        self.saved += spared - restore;
        self.slower += u64::from(restore > spared);
        if let Some(slowest) = bytes.iter().rposition(|bytes| *bytes > 0) {
            self.restores[slowest].push((restore, *bytes));
        }
    }

    pub fn found(mut self, setup: &Setup<'_>, ended: Ended, took: Duration) -> Found {
        let options = setup.options;
        let shape = setup.layout.shape();
        let found: u64 = self.blocks.iter().sum();
        let mut all = Vec::new();
        let mut tiers = Vec::new();
        for (at, tier) in TIERS.into_iter().enumerate() {
            let restores = std::mem::take(&mut self.restores[at]);
            let times: Vec<f64> = restores.iter().map(|(time, _)| *time).collect();
            tiers.push(OfTier {
                tier,
                blocks: self.blocks[at],
                restored_bytes: self.bytes[at],
                bytes_per_second: ended.rates[at],
                restores: Restores::of(times, at_rates(&restores, &ended.rates)),
            });
            all.extend(restores);
        }
        let times: Vec<f64> = all.iter().map(|(time, _)| *time).collect();
        let read = self.bytes[STORE];
        Found {
            trace: options.trace.display().to_string(),
            real: options.real.as_ref().map(|folder| folder.display().to_string()),
            machine: options.real.is_none().then(|| options.machine.clone()),
            policy: options.policy.name(),
            layers: shape.layers(),
            kv_heads: shape.heads(),
            head_dim: shape.head_dim(),
            dtype: shape.dtype().name(),
            token_bytes: shape.token_bytes().get(),
            block_tokens: setup.layout.block_tokens(),
            block_bytes: setup.stored(),
            groups: setup.layout.groups(),
            page_bytes: setup.layout.page_size().bytes(),
            device_bytes: options.device.get(),
            host_bytes: options.host.get(),
            pool_blocks: setup.blocks,
            store_bytes: options.store.get(),
            tenants: options.tenants.get(),
            requests: self.requests,
            too_large: self.too_large,
            first_too_large: self.first_too_large,
            blocks: self.asked,
            blocks_found: found,
            blocks_computed: self.asked - found.min(self.asked),
            tiers,
            restores: Restores::of(times, at_rates(&all, &ended.rates)),
            prompt_tokens: self.tokens,
            found_tokens: self.found_tokens,
            prefill_rate: self.prefill_rate,
            ttft_saved_s: self.saved,
            slower_than_computing: self.slower,
            store_written_bytes: ended.store_written,
            written_per_byte_read: (read > 0).then(|| ended.store_written as f64 / read as f64),
            store_evicted_blocks: ended.store_evicted,
            scratch_written_bytes: ended.scratch_written,
            evicted_pages: ended.evictions,
            seconds: took.as_secs_f64(),
        }
    }
}

/// Seconds in which the tiers' rates would bring these bytes, tier after tier. `None` if a rate is not known.
fn at_rates(restores: &[(f64, [u64; 4])], rates: &[Option<u64>; 4]) -> Option<f64> {
    let mut seconds = 0.0;
    for (bytes, rate) in restores.iter().flat_map(|(_, bytes)| bytes.iter().zip(rates)).filter(|(bytes, _)| **bytes > 0)
    {
        seconds += *bytes as f64 / rate.filter(|rate| *rate > 0)? as f64;
    }
    Some(seconds)
}

/// How long requests waited for the blocks that they found.
#[derive(Debug, Serialize)]
struct Restores {
    requests: u64,
    median_ms: Option<f64>,
    p99_ms: Option<f64>,
    seconds: f64,
    /// All of that time, of what the bytes take at the tiers' rates.
    of_rate: Option<f64>,
}

impl Restores {
    fn of(mut times: Vec<f64>, at_rates: Option<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let nth = (share * times.len() as f64).ceil() as usize;
            times.get(nth.saturating_sub(1)).map(|time| time * 1e3)
        };
        let seconds = times.iter().sum::<f64>();
        Self {
            requests: times.len() as u64,
            median_ms: at(0.5),
            p99_ms: at(0.99),
            seconds,
            of_rate: at_rates.filter(|at| *at > 0.0).map(|at| seconds / at),
        }
    }

    fn cells(&self) -> [String; 4] {
        let ms = |time: Option<f64>| time.map_or("-".to_owned(), |time| format!("{time:.1} ms"));
        let ratio = self.of_rate.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
        [self.requests.to_string(), ms(self.median_ms), ms(self.p99_ms), ratio]
    }
}

#[derive(Debug, Serialize)]
struct OfTier {
    tier: &'static str,
    blocks: u64,
    restored_bytes: u64,
    bytes_per_second: Option<u64>,
    /// Of requests for which this was the slowest tier.
    restores: Restores,
}

/// The result of `outcore kv replay`.
#[derive(Debug, Serialize)]
pub struct Found {
    trace: String,
    real: Option<String>,
    machine: Option<String>,
    policy: &'static str,
    layers: u32,
    kv_heads: u32,
    head_dim: u32,
    dtype: &'static str,
    token_bytes: u64,
    block_tokens: u32,
    block_bytes: u64,
    groups: u32,
    page_bytes: u64,
    device_bytes: u64,
    host_bytes: u64,
    pool_blocks: u32,
    store_bytes: u64,
    tenants: u64,
    requests: u64,
    too_large: u64,
    first_too_large: Option<String>,
    blocks: u64,
    blocks_found: u64,
    blocks_computed: u64,
    tiers: Vec<OfTier>,
    restores: Restores,
    prompt_tokens: u64,
    found_tokens: u64,
    prefill_rate: f64,
    ttft_saved_s: f64,
    slower_than_computing: u64,
    store_written_bytes: u64,
    written_per_byte_read: Option<f64>,
    store_evicted_blocks: u64,
    scratch_written_bytes: u64,
    evicted_pages: u64,
    seconds: f64,
}

impl Report for Found {
    fn text(&self) -> String {
        let served = self.requests - self.too_large;
        let mut facts = Table::pairs();
        let way = match (&self.real, &self.machine) {
            (Some(folder), _) => format!("on real files in {folder}; every block read was as it was written"),
            (None, Some(machine)) => format!("simulated: no bytes moved; restore times are those of {machine}'s rates"),
            (None, None) => String::new(),
        };
        facts.pair("replayed", format!("{}, {way}", self.trace));
        let Self { layers, kv_heads, head_dim, dtype, block_tokens, groups, .. } = self;
        facts.pair(
            "model",
            format!("{layers} layers, {kv_heads} heads of {head_dim} {dtype}: {} a token", size(self.token_bytes)),
        );
        facts.pair("block", format!("{block_tokens} tokens, {} in {groups} groups of layers", size(self.block_bytes)));
        let room = format!(
            "{} device, {} host, {} blocks in all; store {}; policy {}",
            size(self.device_bytes),
            size(self.host_bytes),
            self.pool_blocks,
            size(self.store_bytes),
            self.policy
        );
        facts.pair("room", room);
        let tenants = if self.tenants > 1 { format!(" of {} tenants", self.tenants) } else { String::new() };
        facts.pair("requests", format!("{}{tenants}, in {:.1} s", self.requests, self.seconds));
        if let Some(first) = &self.first_too_large {
            facts.pair("too large", format!("{} requests were passed over; the first: {first}", self.too_large));
        }
        let found = percent(self.blocks_found, self.blocks);
        facts.pair("blocks", format!("{} asked for, {} found ({found})", self.blocks, self.blocks_found));
        let mut tiers = Table::new(&[
            ("found in", Side::Left),
            ("blocks", Side::Right),
            ("", Side::Right),
            ("restored", Side::Right),
            ("slowest of", Side::Right),
            ("median", Side::Right),
            ("p99", Side::Right),
            ("of rate", Side::Right),
        ]);
        for OfTier { tier, blocks, restored_bytes, restores, .. } in &self.tiers {
            let cells = [(*tier).to_owned(), blocks.to_string(), percent(*blocks, self.blocks), size(*restored_bytes)];
            tiers.row(cells.into_iter().chain(restores.cells()));
        }
        let none = self.blocks_computed;
        let cells = ["none: computed".to_owned(), none.to_string(), percent(none, self.blocks), "-".to_owned()];
        tiers.row(cells.into_iter().chain(self.restores.cells()));
        let mut sums = Table::pairs();
        let (tokens, rate) = (self.found_tokens, self.prefill_rate);
        sums.pair("tokens", format!("{} of prompts, {tokens} not computed", self.prompt_tokens));
        let each = self.ttft_saved_s / (served as f64).max(1.0);
        let slower = self.slower_than_computing;
        sums.pair(
            "TTFT saved",
            format!("{each:.3} s a request at {rate} tokens/s; {slower} were restored slower than computed"),
        );
        let ratio = match self.written_per_byte_read {
            Some(ratio) => format!("{ratio:.2} for each byte read from it"),
            None => "nothing was read from it".to_owned(),
        };
        let evicted = match self.store_evicted_blocks {
            0 => String::new(),
            blocks => format!("; {blocks} blocks made room"),
        };
        sums.pair("store", format!("{} written: {ratio}{evicted}", size(self.store_written_bytes)));
        sums.pair("scratch file", format!("{} written", size(self.scratch_written_bytes)));
        sums.pair("evicted", format!("{} pages of {}", self.evicted_pages, Bytes::new(self.page_bytes)));
        [facts.text(), tiers.text(), sums.text()].join("\n")
    }
}
