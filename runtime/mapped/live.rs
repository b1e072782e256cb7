//! What a process with mapped files does now, and did: what `outcore top` shows, what `outcore run` says at the end,
//! and what its report draws.
//!
//! All of it is bounded, however large the files are and however long the process runs.

use std::collections::VecDeque;
use std::time::Duration;

use outcore::{Bytes, Runtime, Stats};
use serde::{Deserialize, Serialize};

/// Counters since the runtime was opened.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    /// When they were read, in seconds since the runtime was opened.
    pub at: f64,
    /// Pages used. A use that raises no fault counts where the order of use tells of it.
    pub uses: u64,
    /// Uses that found the page resident since an earlier use.
    pub hits: u64,
    /// Uses that found the page read ahead and ready.
    pub prefetched: u64,
    /// Uses that found the page on its way.
    pub late: u64,
    /// Uses that found the page absent.
    pub faults: u64,
    /// Pages that went.
    pub evictions: u64,
    /// Bytes read from files.
    pub read_bytes: u64,
    /// Seconds in which at least one read was under way.
    pub read_seconds: f64,
    /// What pages may take.
    pub budget_bytes: u64,
    /// What pages take.
    pub used_bytes: u64,
    /// What was waited for, as far as anything was.
    pub stalls: Vec<Stall>,
}

/// Waits for one cause.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stall {
    pub cause: String,
    pub count: u64,
    pub seconds: f64,
}

impl Counts {
    /// Of a runtime that was opened so long ago.
    pub fn of(stats: &Stats, open_for: Duration) -> Self {
        let (pager, traffic) = (&stats.pager, &stats.traffic);
        let stalls = stats.stalls.iter().filter(|stall| stall.count > 0).map(|stall| Stall {
            cause: stall.name.to_owned(),
            count: stall.count,
            seconds: stall.time.as_secs_f64(),
        });
        Self {
            at: open_for.as_secs_f64(),
            uses: pager.uses,
            hits: pager.hits,
            prefetched: pager.prefetched,
            late: pager.late,
            faults: pager.faults,
            evictions: pager.evictions,
            read_bytes: traffic.disk_read.get(),
            read_seconds: traffic.disk_busy.as_secs_f64(),
            budget_bytes: stats.device.budget.get(),
            used_bytes: stats.device.used.get(),
            stalls: stalls.collect(),
        }
    }

    /// What happened since `before`, of the same runtime. The memory is as it is now, and `at` is the time in between.
    pub fn since(&self, before: &Self) -> Self {
        let stalls = self.stalls.iter().map(|stall| {
            let old = before.stalls.iter().find(|old| old.cause == stall.cause).cloned().unwrap_or_default();
            Stall {
                cause: stall.cause.clone(),
                count: stall.count.saturating_sub(old.count),
                seconds: (stall.seconds - old.seconds).max(0.0),
            }
        });
        Self {
            at: (self.at - before.at).max(0.0),
            uses: self.uses.saturating_sub(before.uses),
            hits: self.hits.saturating_sub(before.hits),
            prefetched: self.prefetched.saturating_sub(before.prefetched),
            late: self.late.saturating_sub(before.late),
            faults: self.faults.saturating_sub(before.faults),
            evictions: self.evictions.saturating_sub(before.evictions),
            read_bytes: self.read_bytes.saturating_sub(before.read_bytes),
            read_seconds: (self.read_seconds - before.read_seconds).max(0.0),
            budget_bytes: self.budget_bytes,
            used_bytes: self.used_bytes,
            stalls: stalls.filter(|stall| stall.count > 0).collect(),
        }
    }

    /// Hits over uses; `None` without uses.
    pub fn hit_ratio(&self) -> Option<f64> {
        (self.uses > 0).then(|| self.hits as f64 / self.uses as f64)
    }

    /// Bytes a second over the time in which something was read; `None` if nothing was.
    pub fn read_rate(&self) -> Option<f64> {
        (self.read_seconds > 0.0).then(|| self.read_bytes as f64 / self.read_seconds)
    }

    /// Bytes a second over the whole time.
    pub fn mean_rate(&self) -> Option<f64> {
        (self.at > 0.0).then(|| self.read_bytes as f64 / self.at)
    }
}

/// Touches that nobody announced.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Touches {
    /// How many there were.
    pub count: u64,
    /// The bytes of the file that were touched last, as offsets; the latest is the last. The kernel may tell of the
    /// page only, of which it then is the first byte.
    pub last: VecDeque<u64>,
}

/// What of some bytes of a file is in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    pub bytes: u64,
    /// In memory, and used there.
    pub used: u64,
    /// In memory, read ahead, and not used yet.
    pub ahead: u64,
}

impl Held {
    /// In memory.
    pub fn there(&self) -> u64 {
        self.used + self.ahead
    }
}

/// The experts of a layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HeldExperts {
    pub count: u32,
    pub held: Held,
    /// How much of each expert is in memory, in percent. Of more than [`CELLS_MAX`] experts, neighbours share a cell.
    pub cells: Vec<u8>,
}

/// A layer, or what belongs to none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Part {
    pub name: String,
    /// Without its experts.
    pub held: Held,
    pub experts: Option<HeldExperts>,
}

/// What is known of the order in which a program uses a model's files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// None yet.
    #[default]
    Looking,
    /// The headers' order of layers is followed.
    OfHeaders,
    /// The files are used from their first bytes to their last ones.
    ByOffset,
    /// Files are used in turn, a pass over each. That was found in this pass over all of them, or is known from an
    /// earlier run.
    InTurn { pass: Option<u64> },
    /// An order that was learned in an earlier run is followed.
    Kept,
    /// An order was found, in this pass over the files.
    Found { pass: u64 },
    /// Uses have had no order that could be found.
    NoneFound,
}

impl Order {
    /// In words, behind "the order of use".
    pub fn words(self) -> String {
        match self {
            Self::Looking => "was not found: no pass was repeated".to_owned(),
            Self::OfHeaders => "is that of the layers, by the headers".to_owned(),
            Self::InTurn { pass: Some(pass) } => format!("is one file after the other, found in pass {pass}"),
            Self::InTurn { pass: None } => "is one file after the other, as in an earlier run".to_owned(),
            Self::ByOffset => "is that of the bytes in the files".to_owned(),
            Self::Kept => "is known from an earlier run".to_owned(),
            Self::Found { pass } => format!("was found in pass {pass}"),
            Self::NoneFound => "was not found: passes differ".to_owned(),
        }
    }
}

/// What a file shares with the others of its model, and with those that are used in turn with it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Whole {
    /// Tells the orders of use of a process apart.
    pub id: u64,
    /// Files that have this order: those of the model, and of models that are used in turn with it.
    pub ordered: u64,
    /// Files that the model has, and how many of them are mapped.
    pub files: u64,
    pub mapped: u64,
    pub order: Order,
    /// Device and inode of the model's first file.
    pub first: (u64, u64),
    /// Uses of pages so far that have an order.
    pub uses: u64,
    /// Why the file is alone, although its name is that of a part of a model, or an index names it.
    pub alone: Option<String>,
}

/// Models that are told of by name; others are counted.
const MODELS_TOLD: usize = 3;

/// In words: the order in which the files of these names are used, once for each model. Of a file that is mapped in two
/// ways, what was used more counts. Empty without files.
pub fn told_of_order<'a>(files: impl IntoIterator<Item = (&'a str, &'a Whole)>) -> String {
    let mut models: Vec<(&str, &Whole)> = Vec::new();
    for (name, whole) in files {
        let same = models.iter_mut().find(|(_, other)| other.id == whole.id || other.first == whole.first);
        match same {
            Some(known) if known.1.id != whole.id && known.1.uses < whole.uses => *known = (name, whole),
            Some(_) => {}
            None => models.push((name, whole)),
        }
    }
    let one = |(name, whole): &(&str, &Whole)| {
        let Whole { files, mapped, order, alone, ordered, .. } = whole;
        let of = match (*files, models.len()) {
            _ if ordered > files => format!(" of {ordered} files that are used in turn"),
            (1, 1) => String::new(),
            (1, _) => format!(" of {name}"),
            (files, _) if mapped < &files => {
                let (noun, whose) = if *mapped == 1 { ("file", "its") } else { ("files", "their") };
                format!(" of {mapped} {noun} ({whose} model has {files})")
            }
            (files, _) => format!(" of {files} files, one model,"),
        };
        let alone = alone.as_ref().map_or(String::new(), |why| format!(" {name} counts as a model of its own: {why}."));
        format!("The order of use{of} {}.{alone}", order.words())
    };
    let mut all: Vec<String> = models.iter().take(MODELS_TOLD).map(one).collect();
    if models.len() > MODELS_TOLD {
        all.push(format!("There are {} more models.", models.len() - MODELS_TOLD));
    }
    all.join(" ")
}

/// A mapped file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct File {
    /// Without its folder.
    pub name: String,
    /// The model that it is, or is a part of.
    #[serde(default)]
    pub whole: Whole,
    pub held: Held,
    /// The file from its first page on, in equal stretches: how much of each is in memory, in percent.
    pub cells: Vec<u8>,
    /// By layer, as the file's header tells: layers in turn, then what belongs to none. Empty if it is no model.
    pub parts: Vec<Part>,
}

/// The most cells of a row.
pub const CELLS_MAX: usize = 64;
/// The most parts of a file; further layers are in the last one.
pub const PARTS_MAX: usize = 512;

/// What is known of the routing of mixtures of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Experts {
    /// [Hints](crate::Mapped::expert_hint) that were given.
    pub hints: u64,
    /// Experts that they named.
    pub told: u64,
    /// Faults on an expert: nobody had told of it, or its pages were gone again.
    pub touched: u64,
}

impl std::ops::AddAssign for Experts {
    fn add_assign(&mut self, more: Self) {
        let Self { hints, told, touched } = more;
        self.hints += hints;
        self.told += told;
        self.touched += touched;
    }
}

/// Whether the choices of an engine's router are read under `outcore run`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Routing {
    /// No file has experts.
    #[default]
    NoExperts,
    /// They are.
    Read,
    /// `OUTCORE_RUN_ROUTING=off`.
    Off,
    /// The program wants to see tensors itself.
    OwnCallback,
    /// A function of ggml's was not found.
    NoFunctions,
    /// Nobody set a callback through the dynamic linker.
    NeverAsked,
    /// A callback was set, and no tensor of chosen experts came.
    NothingChosen,
    /// Two models have the layers that are chosen from.
    TwoModels,
}

impl Routing {
    /// Why the choices are not read, and what helps; `None` if they are, or if there are none.
    pub fn why_not(self) -> Option<&'static str> {
        match self {
            Self::NoExperts | Self::Read => None,
            Self::Off => Some("OUTCORE_RUN_ROUTING=off"),
            Self::OwnCallback => Some("the program has a callback of its own for ggml's tensors"),
            Self::NoFunctions => Some("a function of ggml's is missing in this version of it"),
            Self::NeverAsked => Some(
                "the engine is not llama.cpp as shared libraries (where llama.cpp is linked in, build it with \
                 -DBUILD_SHARED_LIBS=ON)",
            ),
            Self::NothingChosen => Some("the engine computed no tensor ffn_moe_topk-N"),
            Self::TwoModels => Some("two models have the same layers"),
        }
    }
}

/// What pages and the process may take, and take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// For the whole process; `None` if only pages have a limit.
    pub process_limit_bytes: Option<u64>,
    /// What the process holds, pages included.
    pub resident_bytes: u64,
    /// Memory in frames, free ones included.
    pub frames_bytes: u64,
}

/// The most hits that any policy could have had on the first uses, and those there were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Optimum {
    pub uses: u64,
    pub hit_ratio: f64,
    pub best: f64,
}

impl Optimum {
    /// `None` if nothing was used. Takes up to a tenth of a second.
    pub fn of(runtime: &Runtime) -> Option<Self> {
        let found = runtime.observe().optimum();
        let (hit_ratio, best) = (found.actual_ratio(), found.ratio());
        (found.uses > 0).then_some(Self { uses: found.uses, hit_ratio, best })
    }
}

/// A process at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    pub process: u32,
    pub page_bytes: u64,
    pub policy: String,
    /// Whether the policy follows an order.
    pub planned: bool,
    pub memory: Memory,
    pub counts: Counts,
    pub optimum: Option<Optimum>,
    pub routing: Routing,
    pub experts: Experts,
    pub files: Vec<File>,
}

impl Snapshot {
    /// What the runtime itself knows.
    pub fn of(stats: &Stats, open_for: Duration) -> Self {
        Self {
            process: std::process::id(),
            page_bytes: stats.page_size.bytes(),
            policy: stats.policy.to_owned(),
            planned: stats.planned,
            counts: Counts::of(stats, open_for),
            ..Self::default()
        }
    }

    /// In words: the order in which files are used. Empty without files.
    pub fn told_of_order(&self) -> String {
        told_of_order(self.files.iter().map(|file| (&*file.name, &file.whole)))
    }

    /// In words: how the routing of a mixture was known. Empty if there is none.
    pub fn told_of_experts(&self) -> String {
        let Experts { hints, told, touched } = self.experts;
        match (self.routing, self.routing.why_not()) {
            (Routing::NoExperts, _) => String::new(),
            (_, None) => format!(
                "The router's choice was read {hints} times, of {told} experts; {touched} times an expert came by a \
                 fault."
            ),
            (_, Some(why)) => {
                format!("The router's choice was not read: {why}. Experts came by {touched} faults.")
            }
        }
    }
}

/// A whole run: counters over time, and how it ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// In order of time.
    pub samples: Vec<Counts>,
    pub end: Snapshot,
}

/// Takes counters now and then, and no more than [`Samples::MAX`] in all.
#[derive(Debug)]
pub struct Samples {
    all: Vec<Counts>,
    every: f64,
}

impl Default for Samples {
    fn default() -> Self {
        Self { all: Vec::new(), every: Self::FIRST }
    }
}

impl Samples {
    /// The most that are kept. Where there are more, every second one goes, and from then on they are taken half as
    /// often.
    pub const MAX: usize = 400;
    /// Seconds between samples at first.
    const FIRST: f64 = 0.1;

    /// Whether it is time for another one.
    pub fn wants(&self, open_for: Duration) -> bool {
        self.all.last().is_none_or(|last| open_for.as_secs_f64() - last.at >= self.every)
    }

    pub fn push(&mut self, counts: Counts) {
        self.all.push(counts);
        if self.all.len() > Self::MAX {
            // The first and the last one stay.
            let mut number = 0_usize;
            self.all.retain(|_| {
                number += 1;
                number % 2 == 1
            });
            self.every *= 2.0;
        }
    }

    pub fn into_all(self) -> Vec<Counts> {
        self.all
    }
}

/// The abstract name of the socket at which a process under `outcore run` answers. One connection, one [`Snapshot`] as
/// JSON.
pub fn socket_name(process: u32) -> String {
    format!("outcore-run-{process}")
}

/// A rate in words.
pub fn rate(bytes_per_second: f64) -> String {
    format!("{}/s", Bytes::new(bytes_per_second as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_bounded_and_keep_both_ends() {
        let mut samples = Samples::default();
        let mut taken = 0;
        for tenth in 0..100_000 {
            let open_for = Duration::from_millis(100 * tenth);
            if samples.wants(open_for) {
                taken += 1;
                samples.push(Counts { at: open_for.as_secs_f64(), ..Counts::default() });
            }
        }
        let all = samples.into_all();
        assert!(taken < 3000 && all.len() <= Samples::MAX && all.len() > Samples::MAX / 3, "{taken}, {}", all.len());
        assert!(all[0].at == 0.0 && all.last().is_some_and(|last| last.at > 9900.0));
        assert!(all.is_sorted_by(|a, b| a.at < b.at));
    }

    #[test]
    fn the_order_is_told_once_for_each_model() {
        let whole = |id, files, mapped, order| Whole {
            id,
            ordered: files,
            files,
            mapped,
            order,
            first: (0, id),
            uses: id,
            alone: None,
        };
        let (found, kept) = (whole(1, 4, 4, Order::Found { pass: 2 }), whole(2, 1, 1, Order::Kept));
        assert_eq!(told_of_order([]), "");
        assert_eq!(told_of_order([("a", &kept)]), "The order of use is known from an earlier run.");
        assert_eq!(
            told_of_order([("a", &found), ("b", &found), ("c", &kept)]),
            "The order of use of 4 files, one model, was found in pass 2. The order of use of c is known from an \
             earlier run."
        );
        let less = Whole { alone: Some("x is missing".into()), ..whole(3, 1, 1, Order::Looking) };
        assert_eq!(
            told_of_order([("a", &less)]),
            "The order of use was not found: no pass was repeated. a counts as a model of its own: x is missing."
        );
        assert_eq!(
            told_of_order([("a", &whole(4, 4, 3, Order::OfHeaders))]),
            "The order of use of 3 files (their model has 4) is that of the layers, by the headers."
        );
        let turns = Whole { ordered: 3, ..whole(5, 1, 1, Order::InTurn { pass: Some(3) }) };
        assert_eq!(
            told_of_order([("a", &turns), ("b", &turns)]),
            "The order of use of 3 files that are used in turn is one file after the other, found in pass 3."
        );
        // One file, to be read and to be written privately.
        let more = whole(2, 1, 1, Order::Found { pass: 2 });
        let less = Whole { first: more.first, ..whole(1, 1, 1, Order::Looking) };
        for files in [[("a", &less), ("a", &more)], [("a", &more), ("a", &less)]] {
            assert_eq!(told_of_order(files), "The order of use was found in pass 2.");
        }
        // Two files of one name.
        let others = [("a", &whole(1, 1, 1, Order::Looking)), ("a", &more)].map(|(name, whole)| (name, whole.clone()));
        assert_eq!(told_of_order(others.iter().map(|(name, whole)| (*name, whole))).matches("of a ").count(), 2);
        let many: Vec<Whole> = (0..5).map(|id| whole(id, 1, 1, Order::Kept)).collect();
        let told = told_of_order(["a", "b", "c", "d", "e"].into_iter().zip(&many));
        assert!(told.ends_with("There are 2 more models."), "{told}");
    }

    #[test]
    fn what_happened_in_between_is_a_difference() {
        let stall = |cause: &str, count, seconds| Stall { cause: cause.into(), count, seconds };
        let before = Counts {
            at: 1.0,
            uses: 10,
            hits: 4,
            read_bytes: 100,
            read_seconds: 0.5,
            stalls: vec![stall("a", 1, 0.1), stall("b", 2, 0.2)],
            ..Counts::default()
        };
        let now = Counts {
            at: 3.0,
            uses: 20,
            hits: 12,
            read_bytes: 300,
            read_seconds: 1.0,
            budget_bytes: 7,
            stalls: vec![stall("a", 3, 0.4), stall("b", 2, 0.2), stall("c", 1, 0.5)],
            ..Counts::default()
        };
        let found = now.since(&before);
        assert_eq!((found.at, found.uses, found.hit_ratio(), found.budget_bytes), (2.0, 10, Some(0.8), 7));
        assert_eq!((found.read_rate(), found.mean_rate()), (Some(400.0), Some(100.0)));
        let causes: Vec<&str> = found.stalls.iter().map(|stall| &*stall.cause).collect();
        assert_eq!(causes, ["a", "c"]);
        // A runtime that was opened anew counts from nothing.
        assert_eq!(before.since(&now).uses, 0);
        assert_eq!(Counts::default().hit_ratio(), None);
    }
}
