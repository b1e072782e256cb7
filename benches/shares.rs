//! Do weights and keys and values in one pool do as well as in two pools of the best sizes?
//!
//! The runtime's own pager and policies, with moves that end at once: nothing here depends on the machine or on time.
//! A pass of the server takes as long as its compute, or as its bytes take at the disk's rate, whichever is longer:
//! bytes that are read on faults and ahead, and bytes of dirty pages that are written back. Speed is tokens over the
//! sum of these times. The first quarter of the passes is not counted.
//!
//! Two pools are tried at every split of the frames in sixteenths, each pool under every policy of a list. The best of
//! all these is 1. `docs/results/2026-11-26-weights-and-kv.md` says what the loads are.
//!
//! Parameters: `--load` (all; or a part of a name), `--policy` (of the one pool: all, or one name).

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use outcore::policy::{PageIndex, SegmentClass};
use outcore::{Lookahead, PageSize, PolicyKind};
use outcore_lab::sim::{AnyPolicy, AtOnce, Baseline};
use outcore_pager::{Backing, Move, PageRun, PagerConfig, Place, Purpose, pin};
use serde_json::json;
use support::Random;

/// The splits of the frames between two pools.
const SPLITS: u32 = 16;
/// The machine: bytes that the disk moves in a second; seconds of compute for a pass, and for each token more.
const DISK: f64 = 4e9;
const PASS_COMPUTE: f64 = 3e-3;
const TOKEN_COMPUTE: f64 = 1e-4;

/// The policies tried for a pool of one class, and those for one pool of both.
const OF_A_SPLIT: [AnyPolicy; 6] = [
    AnyPolicy::Kind(PolicyKind::Plan),
    AnyPolicy::Kind(PolicyKind::Auto),
    AnyPolicy::Kind(PolicyKind::Kv),
    AnyPolicy::Kind(PolicyKind::Lirs),
    AnyPolicy::Kind(PolicyKind::WTinyLfu),
    AnyPolicy::Baseline(Baseline::Mru),
];
const FOR_BOTH: [AnyPolicy; 9] = [
    AnyPolicy::Kind(PolicyKind::Shares),
    AnyPolicy::Kind(PolicyKind::Plan),
    AnyPolicy::Kind(PolicyKind::Auto),
    AnyPolicy::Kind(PolicyKind::Kv),
    AnyPolicy::Kind(PolicyKind::Lirs),
    AnyPolicy::Kind(PolicyKind::S3Fifo),
    AnyPolicy::Kind(PolicyKind::WTinyLfu),
    AnyPolicy::Kind(PolicyKind::Lru),
    AnyPolicy::Baseline(Baseline::Mru),
];

/// The experts of each layer.
#[derive(Clone, Copy)]
struct Experts {
    count: u32,
    /// Pages of one.
    pages: u32,
    /// How many a token is given to.
    chosen: u32,
}

/// A model, in pages.
#[derive(Clone, Copy)]
struct Shape {
    layers: u32,
    /// Of a layer, without its experts.
    dense: u32,
    experts: Option<Experts>,
    head: u32,
    /// Layers whose keys and values of some tokens are in one page, and how many tokens these are.
    group: u32,
    block_tokens: u32,
}

impl Shape {
    /// Llama 3.2 1B: weights of one byte, keys and values of two.
    const LLAMA_1B: Self = Self { layers: 16, dense: 29, experts: None, head: 125, group: 8, block_tokens: 128 };
    /// OLMoE 1B-7B, the same.
    const OLMOE: Self = Self {
        layers: 16,
        dense: 8,
        experts: Some(Experts { count: 64, pages: 3, chosen: 8 }),
        head: 49,
        group: 8,
        block_tokens: 32,
    };

    fn groups(&self) -> u32 {
        self.layers / self.group
    }

    fn layer(&self) -> u32 {
        self.dense + self.experts.map_or(0, |experts| experts.count * experts.pages)
    }

    fn weights(&self) -> u32 {
        self.layers * self.layer() + self.head
    }

    /// With pages half as large.
    fn of_small_pages(self) -> Self {
        let experts = self.experts.map(|experts| Experts { pages: experts.pages * 2, ..experts });
        Self { dense: self.dense * 2, head: self.head * 2, experts, block_tokens: self.block_tokens / 2, ..self }
    }

    /// With a layer's keys and values in pages of their own.
    fn of_single_layers(self) -> Self {
        Self { group: 1, block_tokens: self.block_tokens * self.group, ..self }
    }
}

/// Sequences that are served together: all begin at once, and when one ends, another begins.
#[derive(Clone, Copy)]
struct Phase {
    sequences: u32,
    /// Tokens of a prompt, and those of an answer: from half to one and a half times as many.
    prompt: u32,
    answer: u32,
    /// Tokens of a prompt that are computed in one pass.
    chunk: u32,
    passes: u32,
}

/// One use of a page.
#[derive(Clone, Copy)]
struct Use(u32);

impl Use {
    const KEYS: u32 = 1 << 31;
    const WRITE: u32 = 1 << 30;

    fn is_of_keys(self) -> bool {
        self.0 & Self::KEYS != 0
    }
    fn purpose(self) -> Purpose {
        if self.0 & Self::WRITE == 0 { Purpose::Read } else { Purpose::Write }
    }
    fn page(self) -> u32 {
        self.0 & (Self::WRITE - 1)
    }
}

/// What a server uses, pass by pass.
struct Load {
    name: &'static str,
    page: PageSize,
    weights: u32,
    /// Pages of keys and values: as many as are in use at most at a time.
    keys: u32,
    frames: u32,
    uses: Vec<Use>,
    /// Of each pass: the end of its uses, and its tokens.
    passes: Vec<(usize, u32)>,
    /// Whether all weights are used in each pass.
    dense: bool,
}

/// How a load is made.
#[derive(Clone)]
struct Recipe {
    name: &'static str,
    shape: Shape,
    page: u64,
    phases: Vec<Phase>,
    rounds: u32,
    /// Frames, in percent of what weights and keys and values need together.
    percent: u32,
    seed: u64,
    held_back: bool,
}

/// A sequence that is being served.
struct Sequence {
    blocks: Vec<u32>,
    /// Tokens that there are, those that are left of the prompt and those of the answer.
    len: u32,
    prompt: u32,
    answer: u32,
}

/// Makes the uses of a server.
struct Server {
    shape: Shape,
    random: Random,
    /// Blocks that no sequence has, the one that was free for longest first.
    free: VecDeque<u32>,
    made: u32,
    uses: Vec<Use>,
    /// By layer: the experts of the last token, and the layer's order of them.
    last: Vec<Vec<u32>>,
    ranks: Vec<Vec<u32>>,
}

impl Server {
    fn new(shape: Shape, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let count = shape.experts.map_or(0, |experts| experts.count);
        let mut ranks: Vec<Vec<u32>> = (0..shape.layers).map(|_| (0..count).collect()).collect();
        ranks.iter_mut().for_each(|ranks| random.shuffle(ranks));
        let last = vec![Vec::new(); shape.layers as usize];
        Self { shape, random, free: Default::default(), made: 0, uses: Vec::new(), last, ranks }
    }

    fn between(&mut self, mean: u32) -> u32 {
        mean / 2 + self.random.below(u64::from(mean) + 1) as u32
    }

    fn begins(&mut self, phase: &Phase) -> Sequence {
        let (prompt, answer) = (self.between(phase.prompt).max(1), self.between(phase.answer).max(1));
        Sequence { blocks: Vec::new(), len: 0, prompt, answer }
    }

    /// The experts that a layer gives `tokens` tokens to, in order. Each is the previous token's with probability 0.35;
    /// otherwise it is drawn by Zipf's law.
    fn experts(&mut self, layer: usize, tokens: u32) -> Vec<u32> {
        let Some(Experts { count, chosen, .. }) = self.shape.experts else { return Vec::new() };
        let weights: Vec<f64> = (1..=count).map(|rank| 1.0 / f64::from(rank)).collect();
        let sum: f64 = weights.iter().sum();
        let mut used = vec![false; count as usize];
        for _ in 0..tokens {
            let mut own: Vec<u32> = Vec::new();
            while own.len() < chosen as usize {
                let uniform = self.random.below(1 << 32) as f64 / (1u64 << 32) as f64;
                let stays = self.random.below(100) < 35;
                let expert = match self.last[layer].get(own.len()) {
                    Some(last) if stays => *last,
                    _ => {
                        let mut left = uniform * sum;
                        let rank = weights.iter().position(|weight| {
                            left -= weight;
                            left < 0.0
                        });
                        self.ranks[layer][rank.unwrap_or(0)]
                    }
                };
                if !own.contains(&expert) {
                    own.push(expert);
                }
            }
            own.iter().for_each(|expert| used[*expert as usize] = true);
            self.last[layer] = own;
            if used.iter().all(|used| *used) {
                break;
            }
        }
        (0..count).filter(|expert| used[*expert as usize]).collect()
    }

    fn read_weights(&mut self, first: u32, count: u32) {
        self.uses.extend((first..first + count).map(Use));
    }

    /// One pass: each sequence gets its next tokens. Returns how many these are.
    fn pass(&mut self, phase: &Phase, sequences: &mut [Sequence]) -> u32 {
        let (mut tokens, shape) = (0, self.shape);
        let mut written = Vec::new();
        for sequence in sequences.iter_mut() {
            let count = match sequence.prompt {
                0 => 1,
                left => left.min(phase.chunk),
            };
            sequence.prompt = sequence.prompt.saturating_sub(count);
            let first = sequence.len / shape.block_tokens;
            sequence.len += count;
            tokens += count;
            while (sequence.blocks.len() as u32) < sequence.len.div_ceil(shape.block_tokens) {
                let block = self.free.pop_front().unwrap_or_else(|| {
                    self.made += 1;
                    self.made - 1
                });
                sequence.blocks.push(block);
            }
            written.push(first as usize);
        }
        for layer in 0..shape.layers {
            let begin = layer * shape.layer();
            let attention = shape.dense / 4;
            self.read_weights(begin, attention);
            let page = |block: u32| Use::KEYS | (block * shape.groups() + layer / shape.group);
            for (sequence, first) in sequences.iter().zip(&written) {
                let blocks = &sequence.blocks;
                self.uses.extend(blocks[*first..].iter().map(|block| Use(page(*block) | Use::WRITE)));
                self.uses.extend(blocks.iter().map(|block| Use(page(*block))));
            }
            self.read_weights(begin + attention, shape.dense - attention);
            let pages = shape.experts.map_or(0, |experts| experts.pages);
            for expert in self.experts(layer as usize, tokens) {
                self.read_weights(begin + shape.dense + expert * pages, pages);
            }
        }
        self.read_weights(shape.layers * shape.layer(), shape.head);
        for sequence in sequences.iter_mut().filter(|sequence| sequence.prompt == 0) {
            sequence.answer -= 1;
            if sequence.answer == 0 {
                self.free.extend(sequence.blocks.drain(..));
                *sequence = self.begins(phase);
            }
        }
        tokens
    }
}

impl Recipe {
    fn load(&self) -> Load {
        let mut server = Server::new(self.shape, self.seed);
        let mut passes = Vec::new();
        for phase in (0..self.rounds).flat_map(|_| &self.phases) {
            let mut sequences: Vec<Sequence> = (0..phase.sequences).map(|_| server.begins(phase)).collect();
            for _ in 0..phase.passes {
                let tokens = server.pass(phase, &mut sequences);
                passes.push((server.uses.len(), tokens));
            }
            sequences.into_iter().for_each(|sequence| server.free.extend(sequence.blocks));
        }
        let (weights, keys) = (self.shape.weights(), server.made * self.shape.groups());
        Load {
            name: self.name,
            page: PageSize::new(outcore::Bytes::new(self.page)).unwrap(),
            weights,
            keys,
            frames: (weights + keys) * self.percent / 100,
            uses: server.uses,
            passes,
            dense: self.shape.experts.is_none(),
        }
    }
}

/// The classes that a pool holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holds {
    Weights,
    Keys,
    Both,
}

/// Runs the uses of these classes through a pager. Returns, for each pass, how many pages moved from and to the disk.
fn moved(load: &Load, holds: Holds, policy: AnyPolicy, declared: bool, frames: u32) -> Vec<u32> {
    let config = PagerConfig {
        frames,
        host_frames: 0,
        staging: 0,
        direct_io: true,
        lookahead: Lookahead::Auto.pages(load.page, frames),
        page_bytes: load.page.bytes(),
    };
    let mut at_once = AtOnce::new(config, policy.build());
    let pager = &mut at_once.pager;
    let weights = pager.add_segment(Backing::File, SegmentClass::Weights, load.weights);
    let keys = pager.add_segment(Backing::ReadWrite, SegmentClass::KeysAndValues, load.keys.max(1));
    let count = Cell::new(0);
    let moves = |movement: &Move| {
        count.set(count.get() + u32::from(movement.from == Place::Disk || movement.to == Place::Disk));
    };
    if declared && holds != Holds::Keys {
        let order = [PageRun { segment: weights.0, first: PageIndex::new(0), count: load.weights }];
        pager.declare_plan(&order, true, &mut at_once.fx);
        at_once.settle(moves);
    }
    let mut of_passes = Vec::with_capacity(load.passes.len());
    let mut begin = 0;
    for (end, _) in &load.passes {
        for used in &load.uses[begin..*end] {
            if holds != Holds::Both && used.is_of_keys() != (holds == Holds::Keys) {
                continue;
            }
            let (segment, words) = if used.is_of_keys() { &keys } else { &weights };
            let run = [PageRun { segment: *segment, first: PageIndex::new(used.page()), count: 1 }];
            at_once.pin(&run, used.purpose(), moves).unwrap();
            let word = &words[used.page() as usize..][..1];
            let wanted = pin::unpin(word, used.purpose() == Purpose::Write);
            at_once.unpinned(&run, wanted, moves);
        }
        begin = *end;
        of_passes.push(count.take());
    }
    of_passes
}

impl Load {
    /// Seconds that the counted passes take, in which so many pages move.
    fn seconds(&self, moved: impl Fn(usize) -> u32) -> f64 {
        let counted = self.passes.iter().enumerate().skip(self.passes.len() / 4);
        counted
            .map(|(nth, (_, tokens))| {
                let disk = f64::from(moved(nth)) * self.page.bytes() as f64 / DISK;
                disk.max(PASS_COMPUTE + f64::from(*tokens) * TOKEN_COMPUTE)
            })
            .sum()
    }

    fn tokens(&self) -> u64 {
        self.passes.iter().skip(self.passes.len() / 4).map(|(_, tokens)| u64::from(*tokens)).sum()
    }
}

/// A policy of a pool, and whether it is told the order of the weights.
type Under = (AnyPolicy, bool);

fn name((policy, declared): Under) -> String {
    format!("{policy}{}", if declared { ", declared" } else { "" })
}

/// The policies of a pool.
fn under(load: &Load, holds: Holds) -> Vec<Under> {
    let kinds: &[AnyPolicy] = match holds {
        Holds::Both => &FOR_BOTH,
        _ => &OF_A_SPLIT,
    };
    let takes_orders = [PolicyKind::Plan, PolicyKind::Shares].map(AnyPolicy::from);
    let declared = kinds.iter().filter(|kind| load.dense && holds != Holds::Keys && takes_orders.contains(kind));
    kinds.iter().map(|kind| (*kind, false)).chain(declared.map(|kind| (*kind, true))).collect()
}

/// The results of this for every number below `count`, found by all processors.
fn each<T: Send + Sync>(count: usize, call: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let results: Vec<OnceLock<T>> = (0..count).map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    let work = || loop {
        let nth = next.fetch_add(1, Ordering::Relaxed);
        let Some(place) = results.get(nth) else { return };
        let _ = place.set(call(nth));
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(work))));
    results.into_iter().map(|place| place.into_inner().unwrap()).collect()
}

/// The best of all splits between two pools.
struct Best {
    seconds: f64,
    weights: u32,
    under: (Under, Under),
}

fn best_split(load: &Load) -> Best {
    let jobs: Vec<(Holds, Under, u32)> = [Holds::Weights, Holds::Keys]
        .into_iter()
        .flat_map(|holds| under(load, holds).into_iter().map(move |under| (holds, under)))
        .flat_map(|(holds, under)| (1..SPLITS).map(move |parts| (holds, under, parts)))
        .collect();
    let weights = |parts: u32| load.frames * parts / SPLITS;
    let frames = |holds: Holds, parts: u32| match holds {
        Holds::Weights => weights(parts),
        _ => load.frames - weights(parts),
    };
    let passes = each(jobs.len(), |nth| {
        let (holds, (policy, declared), parts) = jobs[nth];
        moved(load, holds, policy, declared, frames(holds, parts))
    });
    let mut best: Option<Best> = None;
    for (of_weights, (_, under, parts)) in jobs.iter().enumerate().filter(|(_, job)| job.0 == Holds::Weights) {
        let beside = jobs.iter().enumerate().filter(|(_, job)| job.0 == Holds::Keys && job.2 == *parts);
        for (of_keys, (_, keys_under, _)) in beside {
            let seconds = load.seconds(|nth| passes[of_weights][nth] + passes[of_keys][nth]);
            if best.as_ref().is_none_or(|best| seconds < best.seconds) {
                best = Some(Best { seconds, weights: weights(*parts), under: (*under, *keys_under) });
            }
        }
    }
    best.unwrap()
}

fn recipes() -> Vec<Recipe> {
    let long = Phase { sequences: 4, prompt: 8192, answer: 24, chunk: 512, passes: 40 };
    let short = Phase { sequences: 16, prompt: 128, answer: 128, chunk: 256, passes: 150 };
    let few = Phase { sequences: 2, prompt: 8192, answer: 24, chunk: 1024, passes: 32 };
    let many = Phase { sequences: 16, prompt: 64, answer: 128, chunk: 64, passes: 80 };
    let (dense, moe) = (Shape::LLAMA_1B, Shape::OLMOE);
    let recipe = |name, shape, phases: &[Phase], rounds| Recipe {
        name,
        shape,
        page: 2 << 20,
        phases: phases.to_vec(),
        rounds,
        percent: 50,
        seed: 1,
        held_back: false,
    };
    let steady = |phase: Phase, passes: u32| [Phase { passes, ..phase }];
    let held_back = |recipe: Recipe, seed, percent| Recipe { seed, percent, held_back: true, ..recipe };
    let prompts = Phase { sequences: 8, prompt: 3000, answer: 40, chunk: 256, passes: 60 };
    let chats = Phase { sequences: 24, prompt: 200, answer: 90, chunk: 128, passes: 90 };
    vec![
        recipe("dense, chats", dense, &steady(short, 400), 1),
        recipe("dense, prompts", dense, &steady(long, 160), 1),
        recipe("MoE, chats", moe, &steady(many, 160), 1),
        recipe("MoE, prompts", moe, &steady(few, 160), 1),
        recipe("dense, changes", dense, &[long, short], 4),
        recipe("dense, single layers, changes", dense.of_single_layers(), &[long, short], 4),
        recipe("MoE, changes", moe, &[few, many], 3),
        held_back(recipe("dense, more chats", dense, &steady(chats, 300), 1), 7, 50),
        held_back(recipe("dense, more prompts", dense, &steady(prompts, 200), 1), 8, 50),
        held_back(recipe("MoE, more chats", moe, &steady(chats, 100), 1), 9, 60),
        held_back(recipe("dense, other changes", dense, &[prompts, chats], 3), 10, 50),
        held_back(recipe("dense, less room, changes", dense, &[long, chats], 3), 11, 35),
        held_back(
            Recipe {
                page: 1 << 20,
                ..recipe("dense, small pages, changes", dense.of_small_pages(), &[prompts, short], 2)
            },
            12,
            50,
        ),
        held_back(recipe("MoE, other changes", moe, &[Phase { prompt: 4000, ..few }, chats], 2), 13, 50),
    ]
}

fn main() {
    let only: String = support::param("load", "all");
    let policy: String = support::param("policy", "all");
    let splits: bool = support::param("splits", "true");
    let mut results = Vec::new();
    for recipe in recipes().iter().filter(|recipe| only == "all" || recipe.name.contains(&only)) {
        let load = recipe.load();
        let best = splits.then(|| best_split(&load));
        println!(
            "{}{}: {} uses, {} weights, {} keys and values, {} frames; goal {}",
            load.name,
            if recipe.held_back { " (held back)" } else { "" },
            load.uses.len(),
            load.weights,
            load.keys,
            load.frames,
            if recipe.phases.len() > 1 { 1.2 } else { 0.98 }
        );
        let speed = |seconds: f64| load.tokens() as f64 / seconds;
        if let Some(best) = &best {
            println!(
                "  {:20} {:8.1} tokens/s, {} frames for weights, under {} and {}",
                "best split",
                speed(best.seconds),
                best.weights,
                name(best.under.0),
                name(best.under.1)
            );
        }
        let pools: Vec<Under> =
            under(&load, Holds::Both).into_iter().filter(|under| policy == "all" || policy == under.0.name()).collect();
        let passes = each(pools.len(), |nth| moved(&load, Holds::Both, pools[nth].0, pools[nth].1, load.frames));
        for (under, passes) in pools.iter().zip(&passes) {
            let seconds = load.seconds(|nth| passes[nth]);
            let ratio = best.as_ref().map(|best| best.seconds / seconds);
            println!("  {:20} {:8.1} tokens/s {:6.3}", name(*under), speed(seconds), ratio.unwrap_or(f64::NAN));
            results.push(json!({ "load": load.name, "policy": name(*under), "of_best_split": ratio }));
        }
    }
    support::json_line("shares", &support::hardware(&support::dir()), json!({ "loads": results }));
}
