//! An answer never depends on who else is served, on drafts, on memory, or on what was preempted for whom.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use outcore::Bytes;
use outcore_kv::TenantId;
use outcore_llm::synthetic::{ARCHS, Experts, Spec};
use outcore_llm::{Arch, Sampler, WeightType};
use outcore_serve::args::Args;
use outcore_serve::engine::{BACKLOG, End, Event, Job, Sink};
use outcore_serve::open::open;
use outcore_serve::tenants::Tenants;
use outcore_testkit::harness::Rng;
use support::{CONTEXT, PATIENCE, Server, VOCAB, small};
use tokio::sync::mpsc::{Receiver, Sender, channel};

const PAGE: [&str; 2] = ["--page-size", "16KiB"];

/// More events than any test lets wait.
const EVENTS: usize = 1 << 16;

/// What is asked for.
#[derive(Clone)]
struct Question {
    prompt: Vec<u32>,
    most: usize,
    seed: u64,
    /// Answers to it.
    choices: usize,
}

impl Question {
    /// Questions of which some begin alike, some repeat themselves, and some are much longer than others.
    fn some(count: usize, seed: u64) -> Vec<Self> {
        let mut rng = Rng::new(seed);
        let shared: Vec<u32> = (0..150).map(|_| rng.below(VOCAB) as u32).collect();
        (0..count)
            .map(|nth| {
                let begins = if nth % 3 == 0 { rng.below(150) as usize } else { 0 };
                let cycle = 1 + rng.below(60);
                let own = (0..1 + rng.below(120)).map(|n| (n % cycle * 7 + cycle) as u32 % VOCAB as u32);
                let prompt = shared[..begins].iter().copied().chain(own).collect();
                let seed = if nth % 2 == 0 { 0 } else { 1 + rng.below(1 << 30) };
                Self { prompt, most: 1 + rng.below(170) as usize, seed, choices: 1 + usize::from(nth % 7 == 0) }
            })
            .collect()
    }

    /// Questions with short prompts, and answers that are much longer than the first ones are expected to be. In layers
    /// with a window a long prompt needs more than its answer ever does, so long prompts make no answer grow.
    fn that_grow(count: usize, seed: u64) -> Vec<Self> {
        let mut rng = Rng::new(seed);
        let mut questions = Self::some(count / 2, seed);
        for question in &mut questions {
            question.prompt.truncate(1 + rng.below(40) as usize);
            question.most = 150 + rng.below(100) as usize;
        }
        questions
    }

    fn job(&self, first: usize, events: &Sender<(usize, Event)>) -> Job {
        let job = |nth: usize| Job {
            tenant: TenantId::new(1),
            prompt: self.prompt.clone(),
            most: self.most,
            sampler: match self.seed {
                0 => Sampler::greedy(),
                // Little randomness: then some drafts hold.
                seed => Sampler::new(0.2, seed + nth as u64).top_p(0.9),
            },
            grammar: None,
            ignore_end: true,
            logprobs: None,
            sink: Sink { index: first + nth, events: events.clone(), enough: Arc::default() },
            received: Instant::now(),
            deadline: Instant::now() + PATIENCE,
            followers: Vec::new(),
            embedding: None,
        };
        let mut whole = job(0);
        whole.followers = (1..self.choices).map(job).collect();
        whole
    }
}

/// The tokens of all answers, by number.
fn collect(mut events: Receiver<(usize, Event)>, count: usize) -> Vec<Vec<u32>> {
    let mut answers = vec![Vec::new(); count];
    let mut open = count;
    while open > 0 {
        match events.blocking_recv().unwrap() {
            (nth, Event::Token(token)) => answers[nth].push(token.id),
            (_, Event::Ended(end)) => {
                assert_eq!(end, End::Length);
                open -= 1;
            }
            (_, Event::Begun(_)) => {}
            (nth, Event::Embedded(_)) => panic!("answer {nth} is an embedding"),
            (nth, Event::Failed(error)) => panic!("answer {nth}: {error}"),
        }
    }
    answers
}

/// The answers to each question when it is alone.
fn alone(spec: &Spec, questions: &[Question]) -> Vec<Vec<u32>> {
    let server = Server::of(|path| spec.write_gguf(path).unwrap(), &PAGE, Tenants::single(None).unwrap(), |_| {});
    let answer = |question: &Question| {
        let (sender, events) = channel(EVENTS);
        server.app.opened.engine.submit(question.job(0, &sender)).unwrap();
        collect(events, question.choices)
    };
    questions.iter().flat_map(answer).collect()
}

/// The answers when all are asked at once.
fn together(server: &Server, questions: &[Question]) -> Vec<Vec<u32>> {
    let (sender, events) = channel(EVENTS);
    let mut count = 0;
    for question in questions {
        server.app.opened.engine.submit(question.job(count, &sender)).unwrap();
        count += question.choices;
    }
    collect(events, count)
}

fn metric(server: &Server, name: &str) -> u64 {
    let text = server.app.opened.metrics.text();
    let values = text.lines().filter_map(|line| line.strip_prefix(name)?.rsplit(' ').next()?.parse::<u64>().ok());
    values.sum()
}

/// Nothing is in use when all have ended.
fn is_empty(server: &Server) {
    let stats = server.app.opened.places.pool().stats();
    assert_eq!((stats.used, stats.active, server.app.opened.engine.unfinished()), (0, 0, 0));
}

#[test]
fn answers_are_the_same_alone_and_in_any_company() {
    same_in_any_company(&small(), Question::some, 30);
}

#[test]
fn answers_of_any_architecture_are_the_same_alone_and_in_any_company() {
    for arch in ARCHS.into_iter().filter(|arch| *arch != Arch::Llama) {
        let (spec, questions) = of_any(arch);
        same_in_any_company(&spec, questions, 24);
    }
}

/// So many questions, of a seed.
type Questions = fn(usize, u64) -> Vec<Question>;

/// A small model of an architecture, and questions whose answers have to make room for each other. Of Gemma 3 five
/// layers see 20 tokens, beside one that sees all. In Phi-3 all layers have the window: here the whole context.
fn of_any(arch: Arch) -> (Spec, Questions) {
    let experts = Spec::small(arch, WeightType::Q8_0).experts;
    let spec = Spec { arch, experts, ..small() };
    match arch {
        Arch::Gemma3 => (Spec { layers: 6, ..spec }, Question::that_grow),
        Arch::Gemma2 | Arch::GptOss => (spec, Question::that_grow),
        Arch::Phi3 => (Spec { window: CONTEXT, ..spec }, Question::some),
        _ => (spec, Question::some),
    }
}

fn same_in_any_company(spec: &Spec, questions: Questions, count: usize) {
    let seed = std::env::var("OUTCORE_SEED").map_or(1, |seed| seed.parse().unwrap());
    let questions = questions(count, seed);
    let wanted = alone(spec, &questions);
    // 64 tokens of a layer have 16 KiB: eight blocks of all layers, where a question with its answer has up to seven.
    let room = format!("{}KiB", 8 * 16 * spec.layers);
    for (preempt, more) in [("park", ""), ("recompute", "--speculate"), ("auto", "--speculate")] {
        let mut args = vec![PAGE[0], PAGE[1], "--kv-memory", &room, "--preempt", preempt];
        args.extend(Some(more).filter(|more| !more.is_empty()));
        let server = Server::of(|path| spec.write_gguf(path).unwrap(), &args, Tenants::single(None).unwrap(), |_| {});
        for frames in [1 << 14, 40] {
            let runtime = server.app.opened.places.pool().runtime();
            runtime.set_device_budget(Bytes::kib(16 * frames)).unwrap();
            let what = format!("{:?}, {preempt} {more} with {frames} frames, seed {seed}", spec.arch);
            assert!(together(&server, &questions) == wanted, "{what}");
            is_empty(&server);
        }
        let preemptions = metric(&server, "outcore_preemptions_total");
        assert!(preemptions > 0, "{:?}, {preempt}: nobody had to make room", spec.arch);
        let accepted = metric(&server, "outcore_accepted_tokens_total");
        let what = format!("{:?}, {preempt} {more}", spec.arch);
        assert_eq!(accepted > 0, !more.is_empty(), "{what}: {accepted} drafted tokens held");
    }
}

/// The most of six answers that are active at a time. Stops when all six are.
fn most_active(spec: &Spec) -> usize {
    const ANSWERS: usize = 6;
    // Blocks of 64 tokens of two layers, 32 KiB each: room for 132, where an answer has 33 to 41.
    let args = [PAGE[0], PAGE[1], "--kv-memory", "4224KiB"];
    let server = Server::of(|path| spec.write_gguf(path).unwrap(), &args, Tenants::single(None).unwrap(), |_| {});
    let (sender, mut events) = channel(EVENTS);
    let enough: Arc<AtomicBool> = Arc::default();
    for nth in 0..ANSWERS {
        let prompt = (0..2000).map(|n| (n * 7 + nth * 11 + 1) as u32 % VOCAB as u32).collect();
        let mut job = Question { prompt, most: 600, seed: 0, choices: 1 }.job(nth, &sender);
        job.sink.enough = enough.clone();
        server.app.opened.engine.submit(job).unwrap();
    }
    let (mut active, mut most, mut ended) = (0_usize, 0, 0);
    while ended < ANSWERS {
        match events.blocking_recv().unwrap().1 {
            Event::Begun(_) => active += 1,
            Event::Ended(_) => (active, ended) = (active - 1, ended + 1),
            Event::Token(_) | Event::Embedded(_) => {}
            Event::Failed(error) => panic!("{error}"),
        }
        most = most.max(active);
        if most == ANSWERS {
            assert_eq!(metric(&server, "outcore_preemptions_total"), 0);
            enough.store(true, Ordering::Relaxed);
            break;
        }
    }
    most
}

/// One of two layers sees 20 tokens. While an answer's prompt is read, in passes of up to 576 tokens, that layer needs
/// 11 of its 33 blocks, and afterwards two. So six answers need no more than 132 blocks with all layers would, in which
/// four have room whose layers see all.
#[test]
fn more_answers_of_a_model_with_windows_are_active_in_the_same_memory() {
    let spec = |window| Spec { arch: Arch::Gemma2, window, ..small() };
    let [within, whole] = [spec(20), spec(CONTEXT)].map(|spec| most_active(&spec));
    assert!(within == 6 && (1..=4).contains(&whole), "{within} and {whole}");
}

/// One answer grows while another one, which is read in each of its passes anew, needs less than when it was admitted.
#[test]
fn regression_nobody_is_preempted_for_room_that_another_answer_has_left() {
    let spec = Spec { arch: Arch::Gemma2, ..small() };
    // Blocks of 64 tokens of a layer: room for 14 of them.
    let args = [PAGE[0], PAGE[1], "--kv-memory", "224KiB", "--concurrency", "2", "--queue", "300"];
    let server = Server::of(|path| spec.write_gguf(path).unwrap(), &args, Tenants::single(None).unwrap(), |_| {});
    let again = Question { prompt: (0..266).map(|n| n % VOCAB as u32).collect(), most: 1, seed: 0, choices: 1 };
    together(&server, std::slice::from_ref(&again));
    // From its 129th token on, the long answer needs five blocks and no longer four. The others are admitted with ten,
    // for passes over all of their tokens, and have seven once 256 of these have been found.
    let long = Question { prompt: vec![1], most: 140, seed: 0, choices: 1 };
    let (sender, events) = channel(EVENTS);
    let mut job = long.job(0, &sender);
    job.followers = (1..=200).map(|nth| again.job(nth, &sender)).collect();
    server.app.opened.engine.submit(job).unwrap();
    assert_eq!(collect(events, 201)[0].len(), 140);
    assert_eq!(metric(&server, "outcore_preemptions_total"), 0);
    is_empty(&server);
}

#[test]
fn answers_are_the_same_with_a_draft_model() {
    same_with_a_draft_model(&small(), Question::some(20, 5), &["park", "recompute"]);
}

#[test]
fn answers_of_a_mixture_are_the_same_with_a_draft_model() {
    let (spec, questions) = of_any(Arch::Qwen3Moe);
    same_with_a_draft_model(&spec, questions(12, 5), &["park"]);
}

#[test]
fn answers_of_a_model_with_windows_are_the_same_with_a_draft_model() {
    let (spec, questions) = of_any(Arch::Gemma3);
    same_with_a_draft_model(&spec, questions(16, 5), &["recompute"]);
}

/// Preempted, cancelled, alone and together.
fn same_with_a_draft_model(spec: &Spec, some: Vec<Question>, preempted: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    // Its drafts hold where an answer is greedy, as far as it sees.
    let draft = folder.path().join("draft.gguf");
    spec.write_gguf(&draft).unwrap();
    // Nothing can be looked up for the first tokens of this one.
    let mut questions = vec![Question { prompt: vec![3, 141, 59, 26], most: 60, seed: 0, choices: 1 }];
    questions.extend(some);
    let wanted = alone(spec, &questions);
    let room = format!("{}KiB", 8 * 16 * spec.layers);
    let more = ["--kv-memory", &room, "--draft-model", draft.to_str().unwrap(), "--preempt"];
    for preempt in preempted {
        let args: Vec<&str> = PAGE.into_iter().chain(more).chain([*preempt]).collect();
        let server = Server::of(|path| spec.write_gguf(path).unwrap(), &args, Tenants::single(None).unwrap(), |_| {});
        // Whether drafts pay goes by the time that passes take, so one answer may have none.
        let accepted = || metric(&server, "outcore_accepted_tokens_total{by=\"model\"}");
        for _ in 0..200 {
            assert!(together(&server, &questions[..1]) == wanted[..1], "{preempt}: alone");
            if accepted() > 0 {
                break;
            }
        }
        assert!(accepted() > 0, "no draft of the same model held");
        assert!(together(&server, &questions) == wanted, "{preempt}: together");
        assert!(metric(&server, "outcore_preemptions_total") > 0, "{preempt}: nobody had to make room");
        // Nobody waits for this one any more.
        let (sender, mut events) = channel(EVENTS);
        let question = Question { prompt: vec![9, 8, 7], most: 16_000, seed: 0, choices: 1 };
        server.app.opened.engine.submit(question.job(0, &sender)).unwrap();
        while !matches!(events.blocking_recv().unwrap().1, Event::Token(_)) {}
        drop((events, sender));
        while server.app.opened.engine.unfinished() > 0 {
            std::thread::yield_now();
        }
        is_empty(&server);
        let drafted = metric(&server, "outcore_drafted_tokens_total{by=\"model\"}");
        assert!(drafted >= metric(&server, "outcore_accepted_tokens_total{by=\"model\"}"));
    }
}

#[test]
fn draft_models_that_cannot_be_used_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str, spec: &Spec| {
        let path = folder.path().join(name);
        spec.write_gguf(&path).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let model = path("model.gguf", &small());
    let larger = path("larger.gguf", &Spec { vocab: VOCAB + 200, ..small() });
    let big =
        path("big.gguf", &Spec { dim: 512, heads: 16, ffn_dim: 2048, layers: 10, dtype: WeightType::F32, ..small() });
    let open_with = |more: &[&str]| {
        let args = ["serve", "--model", &model, "--kv-space", "16MiB", "--threads", "1", "--memory", "140MiB"];
        open(&Args::parse_from(args.iter().chain(more)), &Tenants::single(None).unwrap())
    };
    drop(open_with(&[]).unwrap());
    for (draft, wanted) in [
        (&larger, ["larger.gguf", "another vocabulary", "leave --draft-model out"]),
        (&big, ["big.gguf", "of memory", "leave --draft-model out"]),
    ] {
        let error = open_with(&["--draft-model", draft]).unwrap_err().in_full();
        assert!(wanted.iter().all(|part| error.contains(part)), "wanted {wanted:?}: {error}");
    }
}

/// More than all keys and values that may be active, alone and beside others.
#[test]
fn an_answer_that_is_larger_than_what_may_be_active_is_written_when_nobody_else_is() {
    let long = Question { prompt: (0..900).map(|n| n % VOCAB as u32).collect(), most: 100, seed: 0, choices: 1 };
    let mut questions = Question::some(6, 3);
    questions.insert(2, long);
    let wanted = alone(&small(), &questions);
    let args = [PAGE[0], PAGE[1], "--kv-memory", "256KiB"];
    let server = Server::with(&args, Tenants::single(None).unwrap(), |_| {});
    assert!(together(&server, &questions) == wanted);
    is_empty(&server);
}

/// Of a model with windows in most layers, in a pool that has no whole block for each of an answer's tokens: with
/// forks, drafts, prompts that begin alike, and answers that are preempted.
#[test]
fn answers_are_the_same_where_windows_let_blocks_go() {
    let spec = Spec { arch: Arch::GptOss, layers: 4, context: 2048, window: 20, ..small() };
    let spec = Spec { experts: Some(Experts { count: 4, used: 2, fused: false }), ..spec };
    let long = |count: u32, most, seed| {
        let prompt = (0..count).map(|n| (n * n / 7 + n % 11) % VOCAB as u32).collect();
        Question { prompt, most, seed, choices: 1 + usize::from(seed == 5) }
    };
    let mut questions = Question::some(6, 5);
    questions.extend([long(1300, 600, 0), long(1100, 300, 5), long(1350, 200, 9)]);
    let wanted = alone(&spec, &questions);
    let args = [PAGE[0], PAGE[1], "--memory", "120MiB", "--kv-memory", "256KiB", "--kv-space", "64KiB"];
    for more in [vec![], vec!["--speculate"], vec!["--preempt", "park"]] {
        let args: Vec<&str> = args.into_iter().chain(more).collect();
        let server = Server::of(|path| spec.write_gguf(path).unwrap(), &args, Tenants::single(None).unwrap(), |_| {});
        let pool = server.app.opened.places.pool();
        let whole = 1900_u32.div_ceil(pool.layout().block_tokens());
        assert!(pool.layout().lets_go() && pool.stats().blocks < whole, "{:?}, {whole}", pool.stats());
        assert!(together(&server, &questions[6..7]) == wanted[7..8], "{args:?}: alone");
        assert!(metric(&server, "outcore_kv_blocks_let_go") > 0, "{args:?}");
        assert!(together(&server, &questions) == wanted, "{args:?}");
        is_empty(&server);
    }
}

/// Others ask again whenever they have an answer, so somebody else is always active unless they are held up.
#[test]
fn regression_an_answer_larger_than_what_may_be_active_is_not_passed_for_ever() {
    let long = Question { prompt: (0..900).map(|n| n % VOCAB as u32).collect(), most: 20, seed: 0, choices: 1 };
    let short = Question { prompt: vec![1, 2, 3], most: 40, seed: 0, choices: 1 };
    let args = [PAGE[0], PAGE[1], "--kv-memory", "256KiB"];
    let server = Server::with(&args, Tenants::single(None).unwrap(), |_| {});
    let engine = &server.app.opened.engine;
    let (sender, mut events) = channel(EVENTS);
    let others = |nth: usize| {
        let mut job = short.job(nth, &sender);
        job.tenant = TenantId::new(2 + nth as u64 % 3);
        engine.submit(job).unwrap();
    };
    (1..=6).for_each(others);
    engine.submit(long.job(0, &sender)).unwrap();
    let mut asked = 6;
    let mut begun = false;
    loop {
        match events.blocking_recv().unwrap() {
            (0, Event::Ended(_)) => break,
            (0, Event::Begun(_)) => begun = true,
            (nth, Event::Token(_) | Event::Begun(_)) if nth > 0 => assert!(!begun, "{nth} runs beside it"),
            (_, Event::Ended(_)) => {
                asked += 1;
                assert!(asked < 500, "the long answer still waits");
                others(asked);
            }
            (nth, Event::Failed(error)) => panic!("answer {nth}: {error}"),
            _ => {}
        }
    }
}

#[test]
fn regression_what_was_written_in_time_is_kept() {
    let server = Server::with(&PAGE, Tenants::single(None).unwrap(), |_| {});
    let question = Question { prompt: vec![1, 2, 3], most: 16_000, seed: 0, choices: 1 };
    let mut allowed = Duration::from_micros(500);
    loop {
        let (sender, mut events) = channel(EVENTS);
        let mut job = question.job(0, &sender);
        job.deadline = Instant::now() + allowed;
        server.app.opened.engine.submit(job).unwrap();
        let mut tokens = 0;
        let ended = loop {
            match events.blocking_recv().unwrap().1 {
                Event::Token(_) => tokens += 1,
                Event::Begun(_) => {}
                ended => break ended,
            }
        };
        match (tokens, ended) {
            (0, Event::Failed(error)) => assert_eq!(error.status, 503),
            (1..16_000, Event::Ended(End::Length)) => break,
            (tokens, ended) => panic!("{tokens} tokens in {allowed:?}, then {ended:?}"),
        }
        allowed *= 2;
    }
    is_empty(&server);
}

/// As many tokens as the answers of a tenant have to wait for, where another one asks without end: with one answer at a
/// time, and answers of different lengths.
#[test]
fn regression_tenants_share_the_answers_at_a_time_by_their_weights() {
    let tenants = r#"{"tenants": [
        {"name": "a", "token": "aaaaaaaa"}, {"name": "b", "token": "bbbbbbbb", "weight": 3}
    ]}"#;
    for greedy in [1, 2] {
        let server = Server::with(&[PAGE[0], PAGE[1], "--concurrency", "1"], Tenants::parse(tenants).unwrap(), |_| {});
        let engine = &server.app.opened.engine;
        let (sender, mut events) = channel(EVENTS);
        let others = |nth: usize| {
            let most = 1 + nth * 7 % 40;
            let mut job = Question { prompt: vec![1, 2, 3], most, seed: 0, choices: 1 }.job(nth, &sender);
            job.tenant = TenantId::new(greedy);
            engine.submit(job).unwrap();
        };
        (1..=12).for_each(others);
        let mut job = Question { prompt: vec![4, 5], most: 5, seed: 0, choices: 1 }.job(0, &sender);
        job.tenant = TenantId::new(3 - greedy);
        engine.submit(job).unwrap();
        let mut asked = 12;
        let mut before = 0;
        loop {
            match events.blocking_recv().unwrap() {
                (0, Event::Ended(_)) => break,
                (_, Event::Ended(_)) => {
                    before += 1;
                    asked += 1;
                    others(asked);
                }
                (nth, Event::Failed(error)) => panic!("answer {nth}: {error}"),
                _ => {}
            }
        }
        // One was being written when it came, or had been begun before the thread saw it.
        assert!(before <= 3, "{before} answers of tenant {greedy} came first");
    }
}

/// A tenant that has as many blocks as it may takes none of others, and its answers come one after the other.
#[test]
fn regression_a_tenants_limit_costs_no_other_tenant_its_parked_answers() {
    let tenants = r#"{"tenants": [
        {"name": "a", "token": "aaaaaaaa", "blocks": 4}, {"name": "b", "token": "bbbbbbbb"}
    ]}"#;
    let tenants = Tenants::parse(tenants).unwrap();
    // Room for six blocks of active answers; 32 KiB a block of 64 tokens.
    let args = [PAGE[0], PAGE[1], "--kv-memory", "192KiB", "--preempt", "park"];
    let server = Server::with(&args, tenants, |_| {});
    let (sender, events) = channel(EVENTS);
    let of = |nth: usize, tenant: u64, prompt: usize| {
        let prompt: Vec<u32> = (0..prompt).map(|n| ((n * 7 + nth * 11) % VOCAB as usize) as u32).collect();
        let mut job = Question { prompt, most: 60, seed: 0, choices: 1 }.job(nth, &sender);
        job.tenant = TenantId::new(tenant);
        job
    };
    for nth in 0..6 {
        server.app.opened.engine.submit(of(nth, 2, 150)).unwrap();
        server.app.opened.engine.submit(of(6 + nth, 1, 130)).unwrap();
    }
    let answers = collect(events, 12);
    assert!(answers.iter().all(|answer| answer.len() == 60));
    let recomputed = server.app.opened.metrics.text();
    let recomputed = recomputed.lines().find(|line| line.starts_with("outcore_preemptions_total{how=\"recomputed\"}"));
    assert!(recomputed.is_none_or(|line| line.ends_with(" 0")), "{recomputed:?}");
    is_empty(&server);
}

/// Ten that begin at once, each within the limit, come to more than the limit together.
#[test]
fn regression_answers_of_a_tenant_at_its_limit_take_turns() {
    let tenants = r#"{"tenants": [
        {"name": "a", "token": "aaaaaaaa", "blocks": 8}, {"name": "b", "token": "bbbbbbbb"}
    ]}"#;
    for more in [None, Some("--speculate")] {
        let args: Vec<&str> = PAGE.into_iter().chain(more).collect();
        let server = Server::with(&args, Tenants::parse(tenants).unwrap(), |_| {});
        let (sender, events) = channel(EVENTS);
        for nth in 0..12 {
            let prompt: Vec<u32> = (0..100).map(|n| ((n * 5 + nth * 13) % VOCAB as usize) as u32).collect();
            let mut job = Question { prompt, most: 60, seed: 0, choices: 1 }.job(nth, &sender);
            job.tenant = TenantId::new(if nth < 10 { 1 } else { 2 });
            server.app.opened.engine.submit(job).unwrap();
        }
        let answers = collect(events, 12);
        assert!(answers.iter().all(|answer| answer.len() == 60));
        is_empty(&server);
    }
}

/// Scores of a router, or sinks, that are no numbers: each request of the pass is told, and nothing else is lost.
#[test]
fn a_damaged_model_ends_its_requests_alone() {
    let experts = Some(Experts { count: 8, used: 2, fused: false });
    for (arch, name) in [(Arch::Qwen3Moe, "blk.1.ffn_gate_inp.weight"), (Arch::GptOss, "blk.1.attn_sinks.weight")] {
        let write = |path: &Path| {
            Spec { arch, experts, ..small() }.write_gguf(path).unwrap();
            let header = outcore::format::open(path).unwrap();
            let tensor = header.tensor(name).unwrap();
            let mut bytes = std::fs::read(path).unwrap();
            let values = tensor.offset as usize..(tensor.offset + tensor.len) as usize;
            bytes[values].chunks_exact_mut(4).for_each(|value| value.copy_from_slice(&f32::NAN.to_le_bytes()));
            std::fs::write(path, bytes).unwrap();
        };
        let server = Server::of(write, &PAGE, Tenants::single(None).unwrap(), |_| {});
        for _ in 0..3 {
            for (path, body) in [
                ("/v1/completions", r#"{"prompt": [1, 2, 3], "max_tokens": 5, "n": 3}"#),
                ("/v1/chat/completions", r#"{"messages": [{"role": "user", "content": "a"}]}"#),
                ("/v1/embeddings", r#"{"input": ["a", "b"]}"#),
            ] {
                let answer = server.post(path, body);
                answer.assert_error(500, "server_error", None, Some("internal_error"));
            }
            let streamed = server.post("/v1/completions", r#"{"prompt": [1, 2, 3], "stream": true}"#);
            assert!(streamed.text().contains("internal_error"), "{} {}", streamed.status, streamed.text());
            assert_eq!((server.get("/health").status, server.get("/ready").status), (200, 200));
            server.assert_nothing_is_held();
            is_empty(&server);
        }
    }
}

#[test]
fn regression_whoever_takes_no_events_is_given_up() {
    let server = Server::with(&PAGE, Tenants::single(None).unwrap(), |_| {});
    let (sender, mut events) = channel(BACKLOG);
    let question = Question { prompt: vec![1, 2, 3], most: 5000, seed: 0, choices: 1 };
    server.app.opened.engine.submit(question.job(0, &sender)).unwrap();
    drop(sender);
    let until = Instant::now() + PATIENCE;
    while server.app.opened.engine.unfinished() > 0 {
        assert!(Instant::now() < until);
        std::thread::yield_now();
    }
    let mut taken = 0;
    while let Some((_, event)) = events.blocking_recv() {
        assert!(matches!(event, Event::Begun(_) | Event::Token(_)), "{event:?}");
        taken += 1;
    }
    assert_eq!(taken, BACKLOG);
    is_empty(&server);
}
