//! The pager against a model of bytes, in long random runs and in generated ones. The world plays device, host memory
//! and disk. It ends moves out of order, lets some of them fail, and checks at every step what each guard sees.

#![allow(clippy::unwrap_used, clippy::expect_used, unused_must_use, reason = "a test may panic, and pins often wait")]

use super::world::{Random, Use, World, config, run};
use outcore_lab::sim::AnyPolicy;
use outcore_pager::error::{Error, ErrorKind};
use outcore_pager::ids::ScopeId;
use outcore_pager::ids::{SegmentId, WalkerId};
use outcore_pager::{Backing, PageRun, PolicyKind, ScopePriority};
use outcore_testkit::harness::replay;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// The properties of a run, drawn from its seed.
#[derive(Clone, Copy, Debug)]
struct Shape {
    frames: u32,
    host: u32,
    staging: u32,
    direct: bool,
    policy: AnyPolicy,
    pages: u32,
    /// One in this many moves fails; 0 is none.
    failing: usize,
    actors: usize,
    writers: usize,
    /// Of every three readers, how many are streams.
    streams: usize,
    /// How many scopes of each kind are open at once. There are pins outside of scopes as well.
    scopes: usize,
    /// Whether there are pins of one page that can never be refused, and a floor of one frame for them.
    floor: bool,
    /// Whether the pages that are written are copies of a file's.
    copies: bool,
    /// Whether they are durable, and committed and rolled back now and then.
    durable: bool,
}

fn shape(random: &mut Random) -> Shape {
    let policies: Vec<AnyPolicy> = AnyPolicy::all(&[]).collect();
    Shape {
        frames: 2 + random.below(5) as u32,
        host: random.below(5) as u32,
        staging: 1 + random.below(3) as u32,
        direct: random.below(3) == 0,
        policy: policies[random.below(policies.len())],
        pages: 8 + random.below(24) as u32,
        failing: [0, 0, 5, 20][random.below(4)],
        actors: 1 + random.below(8),
        writers: random.below(3),
        scopes: random.below(4),
        streams: random.below(3),
        floor: random.below(3) == 0,
        copies: random.below(3) == 0,
        durable: random.below(3) == 0,
    }
}

struct Run {
    world: World,
    shape: Shape,
    file: SegmentId,
    memory: SegmentId,
    spare: Option<SegmentId>,
}

impl Run {
    fn new(shape: Shape) -> Self {
        let mut world = World::new(config(shape.frames, shape.host, shape.staging, shape.direct), shape.policy);
        let file = world.segment(Backing::File, shape.pages / 2);
        let backing = match shape {
            Shape { durable: true, .. } => Backing::Durable,
            Shape { copies: true, .. } => Backing::CopyOnWrite,
            _ => Backing::ReadWrite,
        };
        let memory = world.segment(backing, shape.pages - shape.pages / 2);
        if shape.floor {
            world.set_floor(1);
        }
        Self { world, shape, file, memory, spare: None }
    }

    fn runs(&self, random: &mut Random, most: u32) -> Vec<PageRun> {
        let mut runs = Vec::new();
        let mut left = 1 + random.below(most.max(1) as usize) as u32;
        while left > 0 {
            let (segment, pages) = self.segment(random);
            let count = (1 + random.below(left as usize) as u32).min(pages);
            let first = random.below((pages - count + 1) as usize) as u32;
            runs.push(run(segment, first, count));
            left -= count.min(left);
        }
        PageRun::normalize(&mut runs);
        runs
    }

    fn segment(&self, random: &mut Random) -> (SegmentId, u32) {
        if random.below(2) == 0 {
            (self.file, self.shape.pages / 2)
        } else {
            (self.memory, self.shape.pages - self.shape.pages / 2)
        }
    }

    fn step(&mut self, random: &mut Random) {
        let Shape { frames, actors, failing, writers, .. } = self.shape;
        match random.below(32) {
            0..8 if self.world.guards.len() + self.world.waiting.len() < actors => {
                let budget = self.world.budget;
                let scope = random.below(self.world.scopes.len() + 1);
                self.world.scope = self.world.scopes.get(scope).map(|(id, _)| *id);
                if self.shape.floor && random.below(4) == 0 {
                    let purpose = Use::from(writers > 0 && random.below(3) == 0);
                    let (segment, pages) = match purpose {
                        Use::Write => (self.memory, self.shape.pages - self.shape.pages / 2),
                        _ => self.segment(random),
                    };
                    let wanted = run(segment, random.below(pages as usize) as u32, 1);
                    self.world.never_refused = true;
                    self.world.pin(&[wanted], purpose, random.below(2) == 0);
                    self.world.never_refused = false;
                } else if random.below(3) < writers {
                    let count = 1 + random.below(2.min(self.shape.pages as usize / 2)) as u32;
                    let pages = self.shape.pages - self.shape.pages / 2;
                    let first = random.below((pages - count + 1) as usize) as u32;
                    self.world.pin(&[run(self.memory, first, count)], true, false);
                } else {
                    let runs = self.runs(random, budget);
                    let streams = self.shape.streams;
                    let purpose = if streams > 0 && random.below(3) < streams { Use::Stream } else { Use::Read };
                    self.world.pin(&runs, purpose, random.below(2) == 0);
                }
            }
            8 if !self.world.endings.is_empty() => {
                let at = random.below(self.world.endings.len());
                self.world.end(at);
            }
            8..12 if !self.world.guards.is_empty() => {
                let at = random.below(self.world.guards.len());
                end(&mut self.world, at, random);
            }
            12..24 if !self.world.moves.is_empty() => {
                let at = random.below(self.world.moves.len());
                if self.shape.streams > 0 && self.world.can_be_taken(at) && random.below(2) == 0 {
                    return self.world.take_up(at);
                }
                let ok = failing == 0 || random.below(failing) > 0;
                self.world.complete(at, ok);
            }
            24 if !self.world.guards.is_empty() => {
                let at = random.below(self.world.guards.len());
                if self.world.guards[at].exclusive {
                    self.world.write_through(at);
                }
            }
            25 if !self.world.waiting.is_empty() && random.below(3) == 0 => {
                let at = random.below(self.world.waiting.len());
                self.world.cancel(at);
            }
            26 => {
                let runs = self.runs(random, frames);
                self.world.with(|pager, fx| pager.prefetch(&runs, fx));
            }
            27 if random.below(4) == 0 => {
                let runs = self.runs(random, 3);
                self.world.with(|pager, fx| pager.outdate(runs.iter().flat_map(|run| run.pages()), fx));
            }
            27 if random.below(2) == 0 => {
                let runs = self.runs(random, 3);
                runs.iter().flat_map(|run| run.pages()).for_each(|page| self.world.discard_bytes(page));
            }
            27 => {
                let runs = self.runs(random, 3);
                self.world.with(|pager, fx| pager.evict(runs.iter().flat_map(|run| run.pages()), fx));
            }
            28 => {
                let count = random.below(3) as u32;
                match random.below(3) {
                    0 => self.world.with(|pager, fx| pager.trim(count, fx)),
                    1 => self.world.with(|pager, fx| pager.trim_free(count, fx)),
                    _ => {
                        let mut given = Vec::new();
                        self.world.with(|pager, _| given = pager.trim_host(count));
                        self.world.with(|pager, fx| pager.host_discarded(&given, fx));
                        0
                    }
                };
            }
            29 if !self.world.discards.is_empty() => {
                let at = random.below(self.world.discards.len());
                self.world.discarded(at);
            }
            30 if random.below(8) == 0 => self.world.set_budget(1 + random.below(frames as usize + 1) as u32),
            31 => self.rarely(random),
            _ => {}
        }
    }

    fn rarely(&mut self, random: &mut Random) {
        match random.below(16) {
            12 if self.world.pager.walkers() < 4 => self.world.walker = self.world.pager.begin_walker(),
            13 => {
                let walker = self.world.walker;
                self.world.with(|pager, fx| pager.end_walker(walker, fx));
            }
            // The walker is a present one, a past one, or the default one.
            14..16 => self.world.walker = WalkerId::new(random.below(self.world.walker.get() as usize + 2) as u32),
            3..6 if self.world.scopes.len() < self.shape.scopes => {
                if random.below(2) == 0 {
                    self.world.growing_scope();
                } else {
                    let pages = 1 + random.below(self.world.budget.max(1) as usize) as u32;
                    let priority = [ScopePriority::Interactive, ScopePriority::Batch][random.below(2)];
                    let most = self.world.budget - u32::from(self.shape.floor);
                    self.world.reserving_scope(pages.min(most), priority);
                }
            }
            6 if !self.world.scopes.is_empty() => {
                let (scope, _) = self.world.scopes[random.below(self.world.scopes.len())];
                self.world.close_scope(scope);
            }
            7..9 if self.shape.durable => self.world.begin_commit(self.memory),
            9..11 if self.shape.durable => self.world.end_commit(),
            11 if self.shape.durable => self.world.roll_back(self.memory),
            0 => {
                let order = self.runs(random, self.shape.pages);
                let cyclic = random.below(2) == 0;
                let walker = self.world.walker;
                self.world.with(|pager, fx| pager.declare_plan_of(walker, &order, cyclic, fx));
                // At other times the walker expects pages, of which it uses some.
                let soon = self.runs(random, 3);
                self.world.with(|pager, fx| pager.expect(walker, &soon, fx));
            }
            1 if self.spare.is_none() => {
                let segment = self.world.segment(Backing::File, 3);
                self.spare = Some(segment);
                self.world.with(|pager, fx| pager.prefetch(&[run(segment, 0, 3)], fx));
            }
            2 => {
                if let Some(segment) = self.spare.take() {
                    self.world.remove(segment);
                    // Hints may come after their segment has gone.
                    self.world.with(|pager, fx| pager.prefetch(&[run(segment, 0, 3)], fx));
                }
            }
            _ => {}
        }
    }

    /// Ends everything, checks that nothing is lost without a report, and starts over without the lost pages.
    fn rest(&mut self) {
        self.world.drain();
        self.world.set_budget(self.shape.frames);
        self.world.drain();
        self.world.read_all();
        let (in_use, active) = self.world.pager.device_frames();
        assert!(in_use <= active && active == self.shape.frames, "{in_use} of {active}");
    }
}

/// Ends a guard, or begins to end it. In that first step its pins may end or not.
fn end(world: &mut World, guard: usize, random: &mut Random) {
    match random.below(4) {
        0 => world.begin_to_end(guard, true),
        1 => world.begin_to_end(guard, false),
        _ => world.unpin(guard),
    }
}

fn random_run(seed: u64, steps: usize, failing: Option<usize>) -> World {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let shape = shape(&mut random);
    let shape = Shape { failing: failing.unwrap_or(shape.failing), ..shape };
    let mut this = Run::new(shape);
    for step in 0..steps {
        this.step(&mut random);
        if step % 500 == 499 {
            this.rest();
        }
    }
    this.rest();
    this.world
}

/// `OUTCORE_SEED` replays one run, `OUTCORE_STEPS` makes it longer.
#[test]
fn long_random_runs() {
    let steps: usize = std::env::var("OUTCORE_STEPS").ok().and_then(|n| n.parse().ok()).unwrap_or(200_000);
    let each = 2_000;
    let mut commits = (0, 0);
    let seeds = match replay::replayed() {
        Some(seed) => seed..seed + 1,
        None => 1..(steps / each) as u64 + 1,
    };
    for seed in seeds {
        let _replayed = replay::Case::of("long_random_runs", seed);
        match std::panic::catch_unwind(|| random_run(seed, each, None)) {
            Ok(world) => commits = (commits.0 + world.commits.0, commits.1 + world.commits.1),
            Err(panic) => {
                eprintln!("{:?}", shape(&mut Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)));
                std::panic::resume_unwind(panic);
            }
        }
    }
    assert!(replay::replayed().is_some() || commits.0 > 50 && commits.1 > 20, "{commits:?} commits");
}

/// As many moves fail as `OUTCORE_FAILURES` says, every second to every tenth one.
#[test]
#[ignore = "half an hour: make soak runs it"]
fn soak_of_failed_moves() {
    let most = std::env::var("OUTCORE_FAILURES").map_or(10_000_000, |text| text.parse().unwrap());
    let (mut failures, mut runs) = (0, 0);
    let mut seeds = Random(replay::first_seed() | 1);
    while failures < most {
        let seed = replay::replayed().unwrap_or_else(|| seeds.below(usize::MAX) as u64);
        let _replayed = replay::Case::of("soak_of_failed_moves", seed);
        failures += random_run(seed, 2_000, Some([2, 3, 5, 10][(seed % 4) as usize])).failures;
        runs += 1;
        if replay::replayed().is_some() {
            break;
        }
    }
    eprintln!("soak_of_failed_moves: {runs} runs, {failures} injected failures");
}

/// Two bugs that these runs found. The pages that a scope was lent made it a holder, and its other requests were tried
/// with the next event only. And a writer that waited for its own scope's pins was not tried when another holder pinned
/// the page.
#[test]
fn regression_runs_of_many_failures() {
    for seed in [1_911_150_724, 1_318_227_748, 1_453_841_172, 674_533_128] {
        random_run(seed, 2_000, Some([2, 3, 5, 10][(seed % 4) as usize]));
    }
}

fn generated(test: &str, cases: u32) -> ProptestConfig {
    let rng_seed = RngSeed::Fixed(replay::seed(test));
    ProptestConfig { cases, failure_persistence: None, rng_seed, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(generated("generated_runs", 256))]

    /// The choices are generated, so that a failure shrinks.
    #[test]
    fn generated_runs(seed in any::<u64>(), choices in prop::collection::vec(any::<u64>(), 0..200)) {
        let mut random = Random(seed | 1);
        let mut this = Run::new(shape(&mut random));
        for choice in choices {
            this.step(&mut Random(choice | 1));
        }
        this.rest();
    }
}

/// The Nth move fails, for each N until there are fewer than N moves.
#[test]
fn whichever_move_fails_everything_ends() {
    for seed in 1..=40 {
        let mut hit = true;
        let mut nth = 1;
        while hit {
            let mut random = Random((seed * 7919) | 1);
            let mut shape = shape(&mut random);
            shape.failing = 0;
            let mut this = Run::new(shape);
            this.world.fail_nth = nth;
            for _ in 0..200 {
                this.step(&mut random);
            }
            hit = this.world.completions >= nth;
            if this.world.completions < nth {
                this.world.fail_nth = 0;
            }
            this.rest();
            nth += 1;
        }
    }
}

/// The pager is closed at any moment: queued requests end, running fills end, and the pager comes to rest.
#[test]
fn closing_at_any_moment_comes_to_rest() {
    for seed in 1..=300 {
        let mut random = Random((seed * 104_729) | 1);
        let mut this = Run::new(shape(&mut random));
        for _ in 0..random.below(300) {
            this.step(&mut random);
        }
        let closed = Error::new(ErrorKind::Closed, "closing");
        this.world.with(|pager, fx| pager.close(&closed, fx));
        this.world.drain();
    }
}

/// A tier that shrinks must not use more frames than before.
#[test]
fn regression_an_admission_leaves_the_frames_a_shrink_has_claimed() {
    let mut random = Random(1_187_123_052_157_783_486 | 1);
    let mut this = Run::new(Shape { streams: 0, floor: false, ..shape(&mut random) });
    let choices = [
        7_488_604_307_776_002_536u64,
        4_356_448_337_122_454_440,
        4_834_960_726_387_716_746,
        13_493_700_893_990_219_320,
        7_826_901_282_135_636_738,
        11_675_015_192_366_842_512,
        11_287_093_605_534_512_176,
        14_095_378_799_154_718_156,
        12_093_493_379_506_445_882,
        4_202_149_615_198_077_282,
        10_360_506_755_730_537_330,
        12_290_826_257_179_162_462,
        2_817_063_613_655_757_058,
        15_369_939_793_893_507_794,
    ];
    for choice in choices {
        this.step(&mut Random(choice | 1));
    }
    this.rest();
}

/// Every pin belongs to a scope, and no scope lets go before it has all that it wants or is told that others have it.
/// Pins that can never be refused belong to none, and end. So never all scopes wait.
#[test]
fn scopes_never_wait_for_each_other_for_ever() {
    let seeds = replay::replayed().map_or(1..401, |seed| seed..seed + 1);
    for seed in seeds {
        let _replayed = replay::Case::of("scopes_never_wait_for_each_other_for_ever", seed);
        random_scopes(seed);
    }
}

/// A read that can never be refused, outside of scopes. The one before it ends.
fn never_refused_read(world: &mut World, wanted: PageRun) {
    if let Some(at) = world.guards.iter().position(|guard| guard.never_refused) {
        world.unpin(at);
    }
    world.never_refused = true;
    world.pin(&[wanted], Use::Read, false);
    world.never_refused = false;
}

fn random_scopes(seed: u64) {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let (frames, pages) = (3 + random.below(6) as u32, 8 + random.below(8) as u32);
    let host = random.below(3) as u32;
    let mut world = World::new(config(frames, host, 2, host == 0), PolicyKind::Lru);
    let memory = world.segment(Backing::ReadWrite, pages);
    let floor = random.below(2) as u32;
    world.set_floor(floor);
    let mut scopes: Vec<Option<ScopeId>> = vec![None; 2 + random.below(4)];
    for step in 0..600 {
        let at = random.below(scopes.len());
        let is_waiting = |world: &World, scope: ScopeId| world.waiting.iter().any(|wish| wish.scope == Some(scope));
        match scopes[at] {
            None if random.below(3) == 0 => {
                let most = 1 + random.below((frames - floor) as usize) as u32;
                let priority = [ScopePriority::Interactive, ScopePriority::Batch][random.below(2)];
                scopes[at] = Some(world.reserving_scope(most, priority).0);
            }
            None => scopes[at] = Some(world.growing_scope()),
            Some(scope) if is_waiting(&world, scope) => {}
            Some(scope) => {
                let failed = world.failed.len();
                world.scope = Some(scope);
                let count = 1 + random.below(2) as u32;
                let first = random.below((pages - count + 1) as usize) as u32;
                let purpose = [Use::Read, Use::Read, Use::Write][random.below(3)];
                if floor > 0 && at == 0 && random.below(3) == 0 {
                    never_refused_read(&mut world, run(memory, first, 1));
                    continue;
                }
                let pinned = world.pin(&[run(memory, first, count)], purpose, random.below(2) == 0);
                let mine = (0..world.guards.len()).filter(|at| world.guards[*at].scope == Some(scope)).nth(1);
                if let Some(at) = mine.filter(|_| random.below(4) == 0) {
                    end(&mut world, at, &mut random);
                }
                // The scope has all it wants, or was told.
                let done = pinned.is_none() || world.failed.len() > failed || random.below(6) == 0;
                if done && !is_waiting(&world, scope) {
                    let end: Vec<usize> =
                        (0..world.guards.len()).rev().filter(|at| world.guards[*at].scope == Some(scope)).collect();
                    end.into_iter().for_each(|at| self::end(&mut world, at, &mut random));
                    world.close_scope(scope);
                    scopes[at] = None;
                }
            }
        }
        // A scope that was told meanwhile lets go.
        for scope in scopes.iter_mut() {
            let Some(id) = *scope else { continue };
            let told = world.told.contains(&id);
            if told && !is_waiting(&world, id) {
                let end: Vec<usize> =
                    (0..world.guards.len()).rev().filter(|at| world.guards[*at].scope == Some(id)).collect();
                end.into_iter().for_each(|at| self::end(&mut world, at, &mut random));
                world.close_scope(id);
                *scope = None;
            }
        }
        world.told.clear();
        if random.below(2) == 0 && !world.moves.is_empty() {
            let at = random.below(world.moves.len());
            world.complete(at, true);
        }
        if random.below(3) == 0 && !world.endings.is_empty() {
            let at = random.below(world.endings.len());
            world.end(at);
        }
        let all_wait = scopes.iter().all(|scope| scope.is_some_and(|scope| is_waiting(&world, scope)));
        if all_wait {
            loop {
                let refused = world.guards.iter().position(|guard| guard.never_refused);
                match (world.moves.is_empty(), world.endings.is_empty(), refused) {
                    (false, ..) => world.complete(0, true),
                    (_, false, _) => world.end(0),
                    (_, _, Some(guard)) => world.unpin(guard),
                    _ => break,
                }
            }
            let told = !world.told.is_empty();
            let all_wait = scopes.iter().all(|scope| scope.is_some_and(|scope| is_waiting(&world, scope)));
            assert!(
                !all_wait || told,
                "step {step}: everybody waits\n{:#?}\n{:#?}",
                world.waiting,
                world.pager.waiting(99)
            );
        }
    }
    world.drain();
    world.read_all();
}
