//! Replays several passes over one model or two. Compares the hits of walkers with those of one plan for all uses, of
//! LRU, and of the optimum, on the same uses.

use std::collections::HashMap;

use super::opt::min_hits;
use super::{PlanPolicy, Policy, PolicyKind, Take, Want};
use crate::ids::{PageId, PageIndex, SegmentId, WalkerId};
use crate::random::Random;

/// One client: the model that it walks over, and its speed, in any unit.
#[derive(Clone, Copy, Debug)]
struct Client {
    model: u32,
    speed: u32,
}

/// What the policy is told beside the uses.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Told {
    /// Nothing.
    Nothing,
    /// The order, once for all uses.
    OrderOnly,
    /// The walker of each use.
    WalkerOnly,
    /// The order and the walkers.
    Both,
}

#[derive(Debug)]
struct Scene {
    /// Pages of each model.
    models: Vec<u32>,
    clients: Vec<Client>,
    frames: u32,
    lookahead: u32,
    /// Mean uses of each client, in passes of the largest model.
    passes: u32,
    seed: u32,
}

impl Scene {
    /// The client and the page of each use, in order. Clients begin at random places.
    fn uses(&self) -> Vec<(usize, PageId)> {
        let mut random = Random(u64::from(self.seed) + 1);
        let pages = |client: &Client| self.models[client.model as usize];
        let mut at: Vec<u32> = self.clients.iter().map(|client| random.below(pages(client))).collect();
        let speeds: u32 = self.clients.iter().map(|client| client.speed).sum();
        let uses = self.passes * self.models.iter().max().unwrap() * self.clients.len() as u32;
        let one = |_| {
            let mut drawn = random.below(speeds);
            let client = self.clients.iter().position(|client| {
                let found = drawn < client.speed;
                drawn = drawn.wrapping_sub(client.speed);
                found
            });
            let client = client.unwrap();
            let of = self.clients[client];
            let page = PageId { segment: SegmentId(of.model), index: PageIndex(at[client]) };
            at[client] = (at[client] + 1) % pages(&of);
            (client, page)
        };
        (0..uses).map(one).collect()
    }

    fn order(&self, model: u32) -> Vec<PageId> {
        let page = |n| PageId { segment: SegmentId(model), index: PageIndex(n) };
        (0..self.models[model as usize]).map(page).collect()
    }

    /// The share of uses that find their page resident since an earlier use. Fills are done at once.
    fn hits(&self, kind: PolicyKind, told: Told, uses: &[(usize, PageId)]) -> f64 {
        let mut policy = kind.build();
        policy.resize(self.frames, 0, self.lookahead);
        for (model, pages) in self.models.iter().enumerate() {
            policy.segment(SegmentId(model as u32), *pages);
        }
        if told == Told::OrderOnly {
            let orders = (0..self.models.len() as u32).flat_map(|model| self.order(model));
            policy.declare(&orders.collect::<Vec<_>>(), true);
        }
        if told == Told::Both {
            for (client, of) in self.clients.iter().enumerate() {
                policy.walker(WalkerId(client as u32 + 1));
                policy.declare(&self.order(of.model), true);
            }
        }
        // Whether a resident page was used since it came.
        let mut resident: HashMap<PageId, bool> = HashMap::new();
        let mut hits = 0u64;
        for (client, page) in uses {
            if matches!(told, Told::WalkerOnly | Told::Both) {
                policy.walker(WalkerId(*client as u32 + 1));
            }
            policy.accessed(*page);
            match resident.insert(*page, true) {
                Some(used) => hits += u64::from(used),
                None => {
                    assert!(self.room(&mut *policy, &mut resident, *page, Want::Demand), "no room for {page:?}");
                    policy.inserted(*page);
                }
            }
            while let Some(next) = policy.next_fill(&|page| resident.contains_key(&page)) {
                resident.insert(next, false);
                if !self.room(&mut *policy, &mut resident, next, Want::Planned(next)) {
                    resident.remove(&next);
                    break;
                }
                policy.inserted(next);
                policy.filling(next);
            }
        }
        hits as f64 / uses.len() as f64
    }

    /// Takes a frame for a page that already counts as resident.
    fn room(&self, policy: &mut dyn Policy, resident: &mut HashMap<PageId, bool>, coming: PageId, want: Want) -> bool {
        if resident.len() <= self.frames as usize {
            return true;
        }
        let take = &mut |page| if page == coming { Take::Skip } else { Take::Yes };
        let Some(victim) = policy.victim(want, take) else { return false };
        assert!(resident.remove(&victim).is_some(), "{victim:?} is not resident");
        policy.removed(victim);
        true
    }

    fn optimum(&self, uses: &[(usize, PageId)]) -> f64 {
        let number = |page: PageId| page.segment.0 << 24 | page.index.0;
        let order: Vec<u32> = uses.iter().map(|(_, page)| number(*page)).collect();
        min_hits(&order, self.frames as usize) as f64 / uses.len() as f64
    }

    /// Hit ratios of LRU, of one plan for all, of walkers whose order is learned, of walkers whose order is declared,
    /// and of the optimum.
    fn row(&self) -> [f64; 5] {
        let uses = self.uses();
        let plan = |told| self.hits(PolicyKind::Plan, told, &uses);
        let today = plan(Told::OrderOnly).max(plan(Told::Nothing));
        let lru = self.hits(PolicyKind::Lru, Told::Nothing, &uses);
        [lru, today, plan(Told::WalkerOnly), plan(Told::Both), self.optimum(&uses)]
    }
}

fn clients(speeds: &[u32], model: impl Fn(usize) -> u32) -> Vec<Client> {
    speeds.iter().enumerate().map(|(at, speed)| Client { model: model(at), speed: *speed }).collect()
}

/// Mean rows over this many seeds, each with other places to begin.
fn means(seeds: u32, scene: impl Fn(u32) -> Scene) -> [f64; 5] {
    let rows: Vec<[f64; 5]> = (0..seeds).map(|seed| scene(seed).row()).collect();
    std::array::from_fn(|column| rows.iter().map(|row| row[column]).sum::<f64>() / f64::from(seeds))
}

/// For each scene: a name, the pages of each model, and the clients.
fn scenes() -> Vec<(&'static str, Vec<u32>, Vec<Client>)> {
    let equal: &[u32] = &[10; 8];
    let unequal: &[u32] = &[2, 5, 8, 10, 12, 15, 20, 40];
    vec![
        ("8 walkers, 256 pages, one speed", vec![256], clients(equal, |_| 0)),
        ("8 walkers, 256 pages, speeds 1 to 20", vec![256], clients(unequal, |_| 0)),
        ("8 walkers, 700 pages, one speed", vec![700], clients(equal, |_| 0)),
        ("3 walkers, 256 pages, one speed", vec![256], clients(&[1; 3], |_| 0)),
        ("4 + 4 walkers, 200 and 150 pages", vec![200, 150], clients(equal, |at| at as u32 % 2)),
        ("main and draft, 200 and 50 pages", vec![200, 50], clients(&[10, 10], |at| at as u32)),
        ("1 walker, 256 pages", vec![256], clients(&[1], |_| 0)),
    ]
}

/// Replays every scene, and prints the mean rows of `seeds` seeds.
fn replay(sizes: u32, passes: u32, seeds: u32, lookahead: impl Fn(u32) -> u32) {
    println!("{:40} budget    lru  today  learned  declared  optimum", "");
    for (name, models, clients) in scenes() {
        for percent in [25, 50, 75] {
            let models: Vec<u32> = models.iter().map(|pages| pages * sizes).collect();
            let frames = models.iter().sum::<u32>() * percent / 100;
            let lookahead = lookahead(frames);
            let [lru, one_plan, learned, declared, optimum] = means(seeds, |seed| Scene {
                models: models.clone(),
                clients: clients.clone(),
                frames,
                lookahead,
                passes,
                seed,
            });
            println!("{name:40} {percent:4} % {lru:8.3} {one_plan:6.3} {learned:8.3} {declared:9.3} {optimum:8.3}");
            let several = clients.len() > 1;
            // Frames used for streaming hold no page that hits. They are a larger share if frames are few, or if there
            // is one client.
            let goal = if several && percent >= 50 { 0.95 } else { 0.93 };
            assert!(declared >= goal * optimum, "{name}, {percent} %: {declared} of {optimum}");
            // Learning takes two passes.
            let goal = if several { 0.85 } else { 0.75 };
            assert!(learned >= goal * declared, "{name}, {percent} %: {learned} of {declared}");
            // One plan for all is seldom followed. Then pages leave as by `auto`, which may keep as many useful ones.
            let more = declared > (1.1 * lru).max(0.99 * one_plan);
            assert!(!several || more, "{name}: {declared}, {lru}, {one_plan}");
        }
    }
}

#[test]
fn walkers_find_nearly_what_the_optimum_finds() {
    replay(1, 6, 1, |frames| (frames / 32).clamp(4, 8));
}

/// `cargo test --release -p outcore-pager --lib prints_what_walkers_find -- --ignored --nocapture`.
#[test]
#[ignore = "takes a minute; prints a table for people"]
fn prints_what_walkers_find() {
    println!("models of twice the size, 8 pages ahead");
    replay(2, 16, 5, |_| 8);
    println!("the same, as the runtime chooses its lookahead");
    replay(2, 16, 5, |frames| (frames / 16).max((frames / 8).min(8)));
}

/// Victims are offered by their next use by any walker, farthest first, whichever pages are resident, wherever walkers
/// are, and whether plans repeat pages or share some.
#[test]
fn victims_are_those_no_walker_uses_for_longest() {
    let mut random = Random(3);
    let page = |n: u32| PageId { segment: SegmentId(0), index: PageIndex(n) };
    for round in 0..300u32 {
        let repeats = round % 3 == 0;
        let mut policy = PlanPolicy::new();
        policy.segment(SegmentId(0), 256);
        policy.resize(8, 0, 0);
        let orders: Vec<(Vec<u32>, bool)> = (0..1 + random.below(3))
            .map(|plan| {
                let mut order: Vec<u32> = (0..20 + random.below(40)).map(|n| n + 15 * plan).collect();
                if repeats {
                    let again: Vec<u32> = order.iter().copied().filter(|n| n % 4 == 0).collect();
                    order.extend(again);
                    order.dedup();
                }
                (order, random.below(4) > 0)
            })
            .collect();
        // Each walker's plan, and its place in it.
        let mut walkers: Vec<(usize, usize)> = Vec::new();
        for id in 0..2 + random.below(4) {
            let plan = random.below(orders.len() as u32) as usize;
            policy.walker(WalkerId(id + 1));
            let pages: Vec<PageId> = orders[plan].0.iter().map(|n| page(*n)).collect();
            policy.declare(&pages, orders[plan].1);
            walkers.push((plan, 0));
        }
        let mut resident = std::collections::HashSet::new();
        for _ in 0..400 {
            match random.below(3) {
                0 => {
                    let n = random.below(110);
                    if resident.insert(n) {
                        policy.inserted(page(n));
                    } else {
                        resident.remove(&n);
                        policy.removed(page(n));
                    }
                }
                _ => {
                    let at = random.below(walkers.len() as u32);
                    let (plan, position) = &mut walkers[at as usize];
                    let (order, cyclic) = &orders[*plan];
                    if *position + 1 < order.len() || *cyclic {
                        policy.walker(WalkerId(at + 1));
                        policy.accessed(page(order[*position]));
                        *position = (*position + 1) % order.len();
                    }
                }
            }
            let weights = policy.weights();
            let next = |n: u32| {
                let of = |(at, (plan, position)): (usize, &(usize, usize))| {
                    let (order, cyclic) = &orders[*plan];
                    let end = if *cyclic { order.len() } else { order.len() - position };
                    let uses = (0..end).find(|uses| order[(position + uses) % order.len()] == n)?;
                    let weight = weights.iter().find(|(id, _)| id.0 == at as u32 + 1)?.1;
                    (weight > 0).then_some(uses as u64 * weight)
                };
                walkers.iter().enumerate().filter_map(of).min()
            };
            let mut offered = Vec::new();
            policy.victim(Want::Memory, &mut |victim| {
                offered.push(victim.index.0);
                Take::Skip
            });
            let all: std::collections::HashSet<u32> = offered.iter().copied().collect();
            assert_eq!((all.len(), &all), (offered.len(), &resident), "each once: {offered:?}");
            // Pages that no followed plan names come first, then pages that are not used any more.
            let key = |n: &u32| std::cmp::Reverse(next(*n).unwrap_or(u64::MAX));
            if !repeats {
                assert!(offered.is_sorted_by_key(key), "{walkers:?} of {orders:?}: {offered:?}");
            }
        }
    }
}
