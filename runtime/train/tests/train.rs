//! Optimizers over paged tensors: against PyTorch's figures, in any budget, with any pages and threads, and durable.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::num::NonZeroUsize;
use std::path::Path;
use std::thread;

use outcore::durable::{Durable, DurableOptions};
use outcore::{Bytes, DType, ErrorKind, PageSize, PolicyKind, Runtime};
use outcore_testkit::harness::{Faults, Rng};
use outcore_train::{AdamW, Group, NonFinite, Optimizer, OptimizerBuilder, Planned, Rule, Schedule, Sgd};
use serde_json::{Value, json};

fn runtime(page_kib: u64, pages: u64) -> Runtime {
    let page = Bytes::kib(page_kib);
    Runtime::builder()
        .page_size(PageSize::new(page).unwrap())
        .device_budget(Bytes::new(page.get() * pages))
        .policy(PolicyKind::Plan)
        .open()
        .unwrap()
}

fn roomy() -> Runtime {
    runtime(64, 256)
}

fn count(n: usize) -> NonZeroUsize {
    NonZeroUsize::new(n).unwrap()
}

fn bits(runtime: &Runtime, optimizer: &Optimizer, name: &str) -> Vec<u32> {
    let tensor = optimizer.parameter(name).unwrap();
    let guard = runtime.pin(&tensor).wait().unwrap();
    guard.view::<f32>().unwrap().iter().map(|value| value.to_bits()).collect()
}

fn write(runtime: &Runtime, optimizer: &Optimizer, name: &str, values: &[f32]) {
    let tensor = optimizer.parameter(name).unwrap();
    let mut guard = runtime.pin(&tensor).write().wait().unwrap();
    guard.view_mut::<f32>().unwrap().copy_from_slice(values);
}

/// The generator that `data/torch.json` names.
fn generated(seed: u64, scale: f32, elements: usize) -> Vec<f32> {
    let mut x = seed;
    let next = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((x >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    std::iter::repeat_with(next).take(elements).collect()
}

/// Each tensor's parameters after 1, 10 and 100 steps are PyTorch's within a millionth of its largest one.
#[test]
fn rules_give_the_parameters_of_pytorch() {
    let figures: Value = serde_json::from_str(include_str!("data/torch.json")).unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let mut worst = 0f64;
    for (number_of_case, case) in figures["cases"].as_array().unwrap().iter().enumerate() {
        let (settings, rates) = (&case["settings"], case["lr"].as_array().unwrap());
        let rates: Vec<f64> = rates.iter().map(number).collect();
        let weight_decay = number(&settings["weight_decay"]);
        let rule: Box<dyn Rule> = if case["rule"] == "adamw" {
            let betas = (number(&settings["betas"][0]), number(&settings["betas"][1]));
            Box::new(AdamW { betas, epsilon: number(&settings["eps"]), weight_decay })
        } else {
            Box::new(Sgd { momentum: number(&settings["momentum"]), weight_decay })
        };
        let schedule = if rates.iter().all(|rate| *rate == rates[0]) {
            Schedule::constant(rates[0])
        } else {
            Schedule::constant(1e-2).warm_up(10).cosine(100, 0.0)
        };
        for (step, rate) in (1..).zip(&rates) {
            assert!((schedule.rate(step) - rate).abs() <= 1e-12, "step {step}: {} not {rate}", schedule.rate(step));
        }
        let runtime = runtime(16, 64);
        let tensors = case["tensors"].as_array().unwrap();
        let elements = |tensor: &Value| tensor["elements"].as_u64().unwrap() as usize;
        let mut group = Group::new(Boxed(rule), schedule);
        for (at, tensor) in tensors.iter().enumerate() {
            group = group.parameter(format!("{at}"), &[elements(tensor) as u64]);
        }
        let mut optimizer = Optimizer::builder(&runtime).group(group).threads(count(1)).open().unwrap();
        let seed = |tensor: usize, step: u64| number_of_case as u64 * 1_000_003 + tensor as u64 * 10_007 + step;
        for (at, tensor) in tensors.iter().enumerate() {
            write(&runtime, &optimizer, &at.to_string(), &generated(seed(at, 0), 1.0, elements(tensor)));
        }
        for step in 1..=100 {
            for (at, tensor) in tensors.iter().enumerate() {
                let gradients = generated(seed(at, step), 0.125, elements(tensor));
                optimizer.accumulate(&at.to_string(), 0, &gradients, 1.0).unwrap();
            }
            optimizer.step(1.0).unwrap();
            for (at, tensor) in tensors.iter().enumerate() {
                let Some(after) = tensor["after"].get(step.to_string()) else { continue };
                let values = bits(&runtime, &optimizer, &at.to_string());
                let stride = tensor["stride"].as_u64().unwrap() as usize;
                let expected = after["values"].as_array().unwrap();
                assert_eq!(values.iter().step_by(stride).count(), expected.len());
                for (value, expected) in values.iter().step_by(stride).zip(expected) {
                    let off = (f64::from(f32::from_bits(*value)) - number(expected)).abs() / number(&after["largest"]);
                    worst = worst.max(off);
                    assert!(off <= 1e-6, "{}, tensor {at}, step {step}: off by {off}", case["name"]);
                }
            }
        }
    }
    eprintln!("the worst is off by {worst:.2e} of its tensor's largest value");
}

/// A rule behind a pointer.
#[derive(Debug)]
struct Boxed(Box<dyn Rule>);

impl Rule for Boxed {
    fn name(&self) -> &'static str {
        self.0.name()
    }
    fn states(&self) -> &'static [&'static str] {
        self.0.states()
    }
    fn check(&self) -> outcore::Result<()> {
        self.0.check()
    }
    fn update(&self, at: outcore_train::Moment, p: &mut [f32], g: &[f32], states: &mut [&mut [f32]]) {
        self.0.update(at, p, g, states);
    }
}

/// Parameters of three groups: some share pages, and one has more elements than a block.
const SIZES: [(&str, u64); 7] =
    [("a", 40_000), ("b", 5), ("c", 70_001), ("d", 1), ("e", 9_999), ("f", 64), ("g", 33_333)];

fn three_groups(runtime: &Runtime) -> OptimizerBuilder {
    let rate = Schedule::constant(3e-3).warm_up(3).linear(40, 1e-4);
    let mut groups = [
        Group::new(AdamW { weight_decay: 0.1, ..AdamW::default() }, rate),
        Group::new(AdamW { weight_decay: 0.0, ..AdamW::default() }, rate),
        Group::new(Sgd { momentum: 0.9, weight_decay: 0.0 }, Schedule::constant(1e-2)),
    ];
    for (at, (name, size)) in SIZES.iter().enumerate() {
        let group = &mut groups[at % 3];
        *group = group.clone().parameter(*name, &[*size]);
    }
    groups.into_iter().fold(Optimizer::builder(runtime), OptimizerBuilder::group)
}

/// What a program does in a step: several gradients are added to each parameter, whole and in parts.
fn add_gradients(optimizer: &Optimizer, step: u64) {
    for (at, (name, size)) in SIZES.iter().enumerate() {
        let seed = step * 100 + at as u64;
        optimizer.accumulate(name, 0, &generated(seed, 0.5, *size as usize), 1.0).unwrap();
        let (first, len) = (size / 3, (size / 2) as usize);
        optimizer.accumulate(name, first, &generated(seed + 50, 2.0, len), 0.25).unwrap();
    }
}

fn initialise(runtime: &Runtime, optimizer: &mut Optimizer) {
    for (at, (name, size)) in SIZES.iter().enumerate() {
        write(runtime, optimizer, name, &generated(7 * at as u64, 1.0, *size as usize));
    }
    optimizer.refresh_working_copy().unwrap();
}

fn all_bits(runtime: &Runtime, optimizer: &Optimizer) -> Vec<Vec<u32>> {
    SIZES.iter().map(|(name, _)| bits(runtime, optimizer, name)).collect()
}

/// The reference: an element at a time, without pages.
fn by_hand(steps: u64, gradients: DType, clip: f64) -> (Vec<Vec<u32>>, Vec<f64>) {
    let rate = Schedule::constant(3e-3).warm_up(3).linear(40, 1e-4);
    let narrow = |value: f32| match gradients {
        DType::BF16 => half::bf16::from_f32(value).to_f32(),
        _ => value,
    };
    let mut all: Vec<[Vec<f32>; 3]> = SIZES
        .iter()
        .enumerate()
        .map(|(at, (_, size))| {
            let size = *size as usize;
            [generated(7 * at as u64, 1.0, size), vec![0.0; size], vec![0.0; size]]
        })
        .collect();
    let mut norms = Vec::new();
    for step in 1..=steps {
        let mut sums = Vec::new();
        let mut squares = 0f64;
        for (at, (_, size)) in SIZES.iter().enumerate() {
            let (seed, size) = (step * 100 + at as u64, *size as usize);
            let mut sum: Vec<f32> = generated(seed, 0.5, size).into_iter().map(narrow).collect();
            for (sum, more) in sum[size / 3..].iter_mut().zip(generated(seed + 50, 2.0, size / 2)) {
                *sum = narrow(*sum + more * 0.25);
            }
            squares += sum.iter().map(|value| f64::from(*value) * f64::from(*value)).sum::<f64>();
            sums.push(sum);
        }
        let norm = squares.sqrt();
        norms.push(norm);
        let factor = (clip / (norm + 1e-6)).min(1.0) as f32;
        for (at, (kept, sum)) in all.iter_mut().zip(sums).enumerate() {
            for (element, gradient) in sum.into_iter().enumerate() {
                let gradient = [gradient * factor];
                let [p, m, v] = kept;
                let (p, m, v) = (&mut p[element..=element], &mut m[element..=element], &mut v[element..=element]);
                let decay = if at % 3 == 0 { 0.1 } else { 0.0 };
                let at_rate = |rate| outcore_train::Moment { step, rate };
                match at % 3 {
                    2 => Sgd { momentum: 0.9, weight_decay: 0.0 }.update(at_rate(1e-2), p, &gradient, &mut [m]),
                    _ => AdamW { weight_decay: decay, ..AdamW::default() }.update(
                        at_rate(rate.rate(step)),
                        p,
                        &gradient,
                        &mut [m, v],
                    ),
                }
            }
        }
    }
    let bits = |kept: &[Vec<f32>; 3]| kept[0].iter().map(|value| value.to_bits()).collect();
    (all.iter().map(bits).collect(), norms)
}

/// In every budget, with every page size and number of threads: the bits of a loop over elements.
#[test]
fn budgets_pages_and_threads_change_nothing() {
    const STEPS: u64 = 5;
    for gradients in [DType::F32, DType::BF16] {
        let (expected, norms) = by_hand(STEPS, gradients, 20.0);
        assert!(norms.iter().any(|norm| *norm > 20.0), "nothing is clipped: {norms:?}");
        let mut exact: Vec<f64> = Vec::new();
        for (page_kib, pages, threads, has_copy) in
            [(16, 2048, 2, true), (16, 24, 1, true), (16, 40, 4, false), (64, 40, 3, true), (256, 64, 2, false)]
        {
            let runtime = runtime(page_kib, pages);
            let builder = three_groups(&runtime).gradients(gradients).clip(20.0).threads(count(threads));
            let mut optimizer = if has_copy { builder.with_working_copy() } else { builder }.open().unwrap();
            initialise(&runtime, &mut optimizer);
            for step in 1..=STEPS {
                add_gradients(&optimizer, step);
                let made = optimizer.step(1.0).unwrap();
                let norm = norms[step as usize - 1];
                assert!((made.norm / norm - 1.0).abs() < 1e-9, "{} not {norm}", made.norm);
                // The last bit of the norm may decide the last one of all parameters.
                match exact.get(step as usize - 1) {
                    Some(norm) => assert_eq!(made.norm.to_bits(), norm.to_bits(), "{page_kib} KiB"),
                    None => exact.push(made.norm),
                }
            }
            let what = format!("{gradients}, {page_kib} KiB, {pages} pages, {threads} threads");
            let found = all_bits(&runtime, &optimizer);
            for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let wrong = found.iter().zip(expected).position(|(found, expected)| found != expected);
                assert_eq!(wrong, None, "{what}: {} differs", SIZES[at].0);
                if has_copy {
                    let copy = optimizer.working_copy(SIZES[at].0).unwrap();
                    let copy = runtime.pin(&copy).wait().unwrap();
                    let rounded = |bits: &u32| half::bf16::from_f32(f32::from_bits(*bits));
                    let copied: Vec<half::bf16> = expected.iter().map(rounded).collect();
                    assert_eq!(copy.view::<half::bf16>().unwrap(), copied, "{what}: {}", SIZES[at].0);
                }
            }
        }
    }
}

fn state(runtime: &Runtime, folder: &Path) -> Durable {
    runtime.open_durable(folder, DurableOptions::default()).unwrap()
}

/// Resumed after every step, in other budgets: the bits of a run in one piece.
#[test]
fn a_resumed_run_has_the_bits_of_one_in_one_piece() {
    let (expected, _) = by_hand(4, DType::BF16, 1e9);
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for step in 1..=4 {
        let runtime = runtime(16, [300, 24, 40, 60][step as usize - 1]);
        let state = state(&runtime, &folder.path().join("state"));
        let mut optimizer = three_groups(&runtime).gradients(DType::BF16).with_working_copy().open_in(&state).unwrap();
        assert_eq!(optimizer.steps(), step - 1);
        if step == 1 {
            assert_eq!(*optimizer.program(), Value::Null);
            initialise(&runtime, &mut optimizer);
        } else {
            assert_eq!(*optimizer.program(), json!({ "place": step - 1 }));
        }
        add_gradients(&optimizer, step);
        optimizer.step(1.0).unwrap();
        optimizer.commit(&json!({ "place": step })).unwrap();
        // What comes after the commit is gone.
        add_gradients(&optimizer, 77);
        optimizer.step(1.0).unwrap();
        drop((optimizer, state));
        runtime.close().unwrap();
    }
    let runtime = roomy_with(16);
    let state = state(&runtime, &folder.path().join("state"));
    let optimizer = three_groups(&runtime).open_in(&state).unwrap();
    assert_eq!(all_bits(&runtime, &optimizer), expected);
    // The tensors have names under which others find them.
    for name in ["a", "a.exp_avg", "c.momentum_buffer", "g.exp_avg_sq"] {
        assert_eq!(state.tensor(name).unwrap().shape().len(), 1, "{name}");
    }
}

fn roomy_with(page_kib: u64) -> Runtime {
    runtime(page_kib, 1024)
}

#[test]
fn a_rollback_goes_back_to_the_last_commit() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let runtime = runtime(16, 40);
    let state = state(&runtime, &folder.path().join("state"));
    let mut optimizer = three_groups(&runtime).with_working_copy().open_in(&state).unwrap();
    initialise(&runtime, &mut optimizer);
    add_gradients(&optimizer, 1);
    optimizer.step(1.0).unwrap();
    optimizer.commit(&Value::Null).unwrap();
    let committed = all_bits(&runtime, &optimizer);
    for _ in 0..2 {
        add_gradients(&optimizer, 2);
        optimizer.step(1.0).unwrap();
        add_gradients(&optimizer, 3);
        let written = all_bits(&runtime, &optimizer);
        assert_ne!(written, committed);
        optimizer.rollback().unwrap();
        assert_eq!((optimizer.steps(), all_bits(&runtime, &optimizer)), (1, committed.clone()));
        let copy = runtime.pin(&optimizer.working_copy("a").unwrap()).wait().unwrap().bytes().to_vec();
        let rounded: Vec<u8> =
            committed[0].iter().flat_map(|bits| half::bf16::from_f32(f32::from_bits(*bits)).to_le_bytes()).collect();
        assert!(copy == rounded);
    }
    // A step after it is that of a run that never went on.
    add_gradients(&optimizer, 2);
    optimizer.step(1.0).unwrap();
    assert_eq!(all_bits(&runtime, &optimizer), by_hand(2, DType::F32, 1e9).0);
}

#[test]
fn gradients_that_are_missing_or_not_finite_are_named() {
    let runtime = roomy();
    let make = |action| {
        let group = Group::new(AdamW::default(), Schedule::constant(1e-3)).parameter("w", &[100, 3]);
        let group = group.parameter("bias", &[3]);
        let mut optimizer =
            Optimizer::builder(&runtime).group(group).tied("head", "w").non_finite(action).open().unwrap();
        write(&runtime, &optimizer, "w", &[1.0; 300]);
        optimizer.refresh_working_copy().unwrap();
        optimizer
    };
    let mut optimizer = make(NonFinite::Refuse);
    optimizer.accumulate("head", 3, &[1.0; 3], 1.0).unwrap();
    let error = optimizer.step(1.0).unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidArgument && error.to_string().contains("\"bias\" has no gradient"));
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        optimizer.drop_gradients().unwrap();
        optimizer.accumulate("w", 0, &[1.0; 300], 1.0).unwrap();
        optimizer.accumulate("bias", 0, &[1.0; 3], 1.0).unwrap();
        optimizer.accumulate("bias", 1, &[bad], 1.0).unwrap();
        let error = optimizer.step(1.0).unwrap_err();
        assert!(error.to_string().contains("\"bias\""), "{error}");
        assert_eq!((optimizer.steps(), bits(&runtime, &optimizer, "w")), (0, vec![1f32.to_bits(); 300]));
        // Also where later gradients make a sum of it that is no number.
        optimizer.accumulate("bias", 1, &[1.0], 1.0).unwrap();
        assert!(optimizer.step(1.0).is_err());
    }
    let mut optimizer = make(NonFinite::Skip);
    optimizer.accumulate("w", 0, &[f32::MAX; 300], 4.0).unwrap();
    optimizer.accumulate("bias", 0, &[1.0; 3], 1.0).unwrap();
    let step = optimizer.step(1.0).unwrap();
    assert_eq!((step.number, step.skipped.as_deref()), (0, Some("w")));
    assert_eq!(bits(&runtime, &optimizer, "w"), vec![1f32.to_bits(); 300]);
    // The gradients are gone, and the next step is the first one. Both names add to one gradient.
    for name in ["w", "head"] {
        optimizer.accumulate(name, 0, &[0.5; 300], 1.0).unwrap();
    }
    optimizer.accumulate("bias", 0, &[1.0; 3], 1.0).unwrap();
    let step = optimizer.step(1.0).unwrap();
    assert_eq!((step.number, step.skipped, step.norm), (1, None, 303f64.sqrt()));
}

#[test]
fn what_cannot_be_is_refused_with_the_name() {
    let runtime = roomy();
    let rate = Schedule::constant(1e-3);
    let group = |rule: AdamW| Group::new(rule, rate).parameter("w", &[4]);
    let refused = |builder: OptimizerBuilder, says: &str| {
        let error = builder.open().unwrap_err();
        assert!(error.kind() == ErrorKind::InvalidArgument && error.to_string().contains(says), "{error}");
    };
    let new = || Optimizer::builder(&runtime);
    refused(new(), "no parameters");
    refused(new().group(group(AdamW::default())).group(group(AdamW::default())), "\"w\" is in the groups twice");
    refused(new().group(group(AdamW { betas: (1.0, 0.9), ..AdamW::default() })), "beta1 is 1");
    refused(new().group(group(AdamW { betas: (0.9, -0.1), ..AdamW::default() })), "beta2 is -0.1");
    refused(new().group(group(AdamW { epsilon: f64::NAN, ..AdamW::default() })), "epsilon is NaN");
    refused(new().group(group(AdamW { weight_decay: -1.0, ..AdamW::default() })), "weight_decay is -1");
    refused(new().group(Group::new(AdamW::default(), Schedule::constant(-1.0)).parameter("w", &[1])), "rate is -1");
    let infinite = Schedule::constant(1.0).cosine(5, f64::INFINITY);
    refused(new().group(Group::new(Sgd::default(), infinite).parameter("w", &[1])), "rate is inf");
    refused(new().group(Group::new(Sgd::default(), rate).parameter("w", &[3, 0])), "\"w\" has the shape [3, 0]");
    refused(new().group(Group::new(Sgd::default(), rate).parameter("w", &[1 << 40, 1 << 40])), "\"w\" has the shape");
    refused(new().group(group(AdamW::default()).parameter("w.exp_avg", &[4])), "\"w.exp_avg\" is a parameter, and");
    refused(new().group(group(AdamW::default())).gradients(DType::F16), "F16");
    refused(new().group(group(AdamW::default())).clip(0.0), "norm of 0");
    refused(new().group(group(AdamW::default())).tied("head", "x"), "\"head\" is tied to \"x\"");
    refused(new().group(group(AdamW::default())).tied("w", "w"), "\"w\" is tied");
    let mut optimizer = new().group(group(AdamW::default())).open().unwrap();
    for (name, first, len) in [("x", 0, 1), ("w", 2, 3), ("w", u64::MAX, 1)] {
        let error = optimizer.accumulate(name, first, &vec![0.0; len], 1.0).unwrap_err();
        assert!(error.to_string().contains(&format!("{name:?}")), "{error}");
    }
    assert_eq!(optimizer.working_copy("w").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(optimizer.commit(&Value::Null).unwrap_err().kind(), ErrorKind::InvalidArgument);
    // A budget that does not hold a block says so before anything changes.
    let small = self::runtime(64, 5);
    let mut optimizer = Optimizer::builder(&small).group(group(AdamW::default())).open().unwrap();
    optimizer.accumulate("w", 0, &[1.0; 4], 1.0).unwrap();
    assert_eq!(optimizer.step(1.0).unwrap_err().kind(), ErrorKind::BudgetTooSmall);
    assert_eq!((optimizer.steps(), bits(&small, &optimizer, "w")), (0, vec![0; 4]));
}

#[test]
fn a_folder_of_other_parameters_or_rules_is_refused() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let runtime = roomy();
    let state = state(&runtime, &folder.path().join("state"));
    let rate = Schedule::constant(1e-3);
    let of = |group: Group| Optimizer::builder(&runtime).group(group).open_in(&state);
    let mut optimizer = of(Group::new(AdamW::default(), rate).parameter("w", &[6]).parameter("x", &[2])).unwrap();
    optimizer.commit(&Value::Null).unwrap();
    drop(optimizer);
    for (group, says) in [
        (Group::new(Sgd::default(), rate).parameter("w", &[6]).parameter("x", &[2]), "is adamw of 2"),
        (Group::new(AdamW::default(), rate).parameter("w", &[6]), "not adamw of 1 parameters"),
        (Group::new(AdamW::default(), rate).parameter("w", &[7]).parameter("x", &[2]), "9 elements"),
        (Group::new(AdamW::default(), rate).parameter("w", &[2, 3]).parameter("x", &[2]), "\"w\" is F32 [6]"),
        (Group::new(AdamW::default(), rate).parameter("w", &[6]).parameter("y", &[2]), "\"y\""),
        (Group::new(AdamW::default(), rate).parameter("x", &[2]).parameter("w", &[6]), "order"),
    ] {
        let error = of(group).unwrap_err();
        assert!(error.to_string().contains(says), "{error} has no {says:?}");
    }
    // The rate may change.
    of(Group::new(AdamW::default(), Schedule::constant(1.0)).parameter("w", &[6]).parameter("x", &[2])).unwrap();
    state.set_note(b"{}");
    let group = Group::new(AdamW::default(), rate).parameter("w", &[6]).parameter("x", &[2]);
    assert_eq!(of(group.clone()).unwrap_err().kind(), ErrorKind::Format);
    state.set_note(br#"{"optimizer":{"format":"outcore-train","version":2}}"#);
    assert_eq!(of(group).unwrap_err().kind(), ErrorKind::Unsupported);
}

/// A step that fails on its way goes on where it stopped, or is rolled back: no parameter gets a gradient twice.
#[test]
fn a_step_that_fails_goes_on_or_is_rolled_back() {
    let (expected, _) = by_hand(2, DType::F32, 1e9);
    let mut failures = [0, 0];
    for seed in 0..30 {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let faults = Faults::new();
        let page = Bytes::kib(16);
        let runtime = Runtime::builder()
            .page_size(PageSize::new(page).unwrap())
            .device_budget(Bytes::new(page.get() * 24))
            .policy(PolicyKind::Plan)
            .store(outcore::store::StoreOptions::new(outcore::IoBackend::Threads).hook(faults.clone()))
            .open()
            .unwrap();
        let state = state(&runtime, &folder.path().join("state"));
        let mut optimizer = three_groups(&runtime).open_in(&state).unwrap();
        initialise(&runtime, &mut optimizer);
        optimizer.commit(&Value::Null).unwrap();
        let goes_on = seed % 2 == 0;
        for step in 1..=2 {
            add_gradients(&optimizer, step);
            faults.random(Rng::new(seed), 40);
            let mut made = optimizer.step(1.0);
            faults.off();
            if made.is_err() {
                failures[usize::from(goes_on)] += 1;
                if !goes_on {
                    while optimizer.rollback().is_err() {}
                    for step in optimizer.steps() + 1..step {
                        add_gradients(&optimizer, step);
                        optimizer.step(1.0).unwrap();
                    }
                    add_gradients(&optimizer, step);
                }
                made = optimizer.step(1.0);
            }
            assert_eq!(made.unwrap().number, step, "seed {seed}");
        }
        assert!(all_bits(&runtime, &optimizer) == expected, "seed {seed}");
    }
    assert!(failures.iter().all(|count| *count > 2), "few steps failed: {failures:?}");
}

/// Parameters are updated when they are needed, in any order and in parts, or by nobody before the step's end.
#[test]
fn a_step_in_parts_has_the_bits_of_one_in_one_piece() {
    let (expected, norms) = by_hand(6, DType::BF16, 20.0);
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let runtime = runtime(16, 40);
    let state = state(&runtime, &folder.path().join("state"));
    let builder = three_groups(&runtime).gradients(DType::BF16).with_working_copy().clip(20.0);
    let mut optimizer = builder.open_in(&state).unwrap();
    initialise(&runtime, &mut optimizer);
    let planned = SIZES
        .iter()
        .flat_map(|(name, _)| [Planned::Update((*name).to_owned()), Planned::Use(optimizer.parameter(name).unwrap())]);
    let planned: Vec<Planned> = planned.collect();
    optimizer.plan_pass_with_updates(&planned).unwrap();
    let mut random = Rng::new(3);
    // Without a step, nothing is to be done.
    optimizer.update("a", 0..1).unwrap();
    optimizer.end_step().unwrap();
    for step in 1..=6 {
        add_gradients(&optimizer, step);
        let begun = optimizer.begin_step(1.0).unwrap();
        assert!((begun.norm / norms[step as usize - 1] - 1.0).abs() < 1e-9 && begun.number == step);
        assert!(optimizer.is_in_step() && optimizer.steps() == step - 1);
        for _ in 0..random.below(40) {
            let (name, size) = SIZES[random.below(SIZES.len() as u64) as usize];
            let first = random.below(size);
            optimizer.update(name, first..first + random.below(size - first + 1)).unwrap();
        }
        for refused in [
            optimizer.accumulate("a", 0, &[1.0], 1.0).unwrap_err(),
            optimizer.begin_step(1.0).unwrap_err(),
            optimizer.commit(&Value::Null).unwrap_err(),
            optimizer.drop_gradients().unwrap_err(),
        ] {
            assert!(refused.to_string().contains("a step is under way"), "{refused}");
        }
        let size = SIZES[0].1;
        for elements in [size..size + 1, 0..u64::MAX, size..size - 1] {
            assert_eq!(optimizer.update(SIZES[0].0, elements).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        assert_eq!(optimizer.update("nobody", 0..1).unwrap_err().kind(), ErrorKind::NotFound);
        if random.below(2) == 0 {
            optimizer.end_step().unwrap();
        } else {
            // `step` ends what has begun.
            assert_eq!(optimizer.step(1.0).unwrap().number, step);
        }
        assert_eq!(optimizer.steps(), step);
        optimizer.commit(&Value::Null).unwrap();
    }
    assert!(all_bits(&runtime, &optimizer) == expected);
    // Many threads, of which some need what others update.
    let expected = {
        let runtime = roomy_with(16);
        let mut optimizer = three_groups(&runtime).gradients(DType::BF16).clip(20.0).open().unwrap();
        initialise(&runtime, &mut optimizer);
        for step in 1..=7 {
            add_gradients(&optimizer, step);
            optimizer.step(1.0).unwrap();
        }
        all_bits(&runtime, &optimizer)
    };
    add_gradients(&optimizer, 7);
    optimizer.begin_step(1.0).unwrap();
    thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| SIZES.iter().for_each(|(name, size)| optimizer.update(name, 0..*size).unwrap()));
        }
    });
    optimizer.end_step().unwrap();
    assert!(all_bits(&runtime, &optimizer) == expected);
    optimizer.rollback().unwrap();
    let expected = all_bits(&runtime, &optimizer);
    // A step that has begun is rolled back like one that has failed.
    add_gradients(&optimizer, 7);
    optimizer.begin_step(1.0).unwrap();
    optimizer.update("a", 0..SIZES[0].1).unwrap();
    optimizer.rollback().unwrap();
    assert!(!optimizer.is_in_step() && optimizer.steps() == 6);
    assert!(all_bits(&runtime, &optimizer) == expected);
    // A plan that names what is not there changes nothing.
    let refused = optimizer.plan_pass_with_updates(&[Planned::Update("nobody".into())]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotFound);
}

/// Elements without gradients have zeros, whatever the last step had there.
#[test]
fn regression_old_gradients_are_not_applied_again() {
    let runtime = runtime(16, 64);
    let group = Group::new(Sgd::default(), Schedule::constant(1.0)).parameter("rows", &[10, 8192]);
    let mut optimizer = Optimizer::builder(&runtime).group(group).non_finite(NonFinite::Skip).open().unwrap();
    optimizer.accumulate("rows", 0, &vec![1.0; 81_920], 1.0).unwrap();
    optimizer.step(1.0).unwrap();
    // Of a step that is skipped, nothing is left either.
    optimizer.accumulate("rows", 5 * 8192, &vec![f32::INFINITY; 8192], 1.0).unwrap();
    assert!(optimizer.step(1.0).unwrap().skipped.is_some());
    optimizer.accumulate("rows", 0, &vec![1.0; 8192], 1.0).unwrap();
    let step = optimizer.step(1.0).unwrap();
    assert_eq!((step.number, step.norm), (2, 8192f64.sqrt()));
    let found = bits(&runtime, &optimizer, "rows");
    let expected = |at: usize| if at < 8192 { -2f32 } else { -1f32 };
    assert_eq!(found.iter().enumerate().position(|(at, bits)| *bits != expected(at).to_bits()), None);
}

/// What other threads add to other elements changes no bit of the norm.
#[test]
fn gradients_come_from_several_threads() {
    let runtime = runtime(16, 64);
    let norm = |threads: u64| {
        let group = Group::new(Sgd::default(), Schedule::constant(1.0)).parameter("w", &[50_000]);
        let mut optimizer = Optimizer::builder(&runtime).group(group).open().unwrap();
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let optimizer = &optimizer;
                scope.spawn(move || {
                    for part in (thread..500).step_by(threads as usize) {
                        optimizer.accumulate("w", part * 100, &generated(part, 1.0, 100), 1.0).unwrap();
                    }
                });
            }
        });
        let step = optimizer.step(1.0).unwrap();
        (step.norm.to_bits(), bits(&runtime, &optimizer, "w"))
    };
    assert!(norm(1) == norm(5));
}

#[test]
fn factors_that_are_not_finite_or_make_it_so_are_refused() {
    let runtime = roomy();
    let group = Group::new(AdamW::default(), Schedule::constant(1e-3)).parameter("w", &[8]);
    let mut optimizer = Optimizer::builder(&runtime).group(group).open().unwrap();
    optimizer.accumulate("w", 0, &[1e30; 8], 1.0).unwrap();
    for factor in [f32::NAN, f32::INFINITY, 1e20] {
        assert_eq!(optimizer.step(factor).unwrap_err().kind(), ErrorKind::InvalidArgument, "{factor}");
    }
    assert_eq!((optimizer.step(1e-30).unwrap().number, optimizer.steps()), (1, 1));
}

/// A rule that panics leaves a block of which nobody knows how far it is: only a roll back helps.
#[derive(Debug)]
struct Panics;

impl Rule for Panics {
    fn name(&self) -> &'static str {
        "panics"
    }
    fn states(&self) -> &'static [&'static str] {
        &[]
    }
    fn check(&self) -> outcore::Result<()> {
        Ok(())
    }
    fn update(&self, at: outcore_train::Moment, parameters: &mut [f32], gradients: &[f32], _: &mut [&mut [f32]]) {
        parameters.iter_mut().zip(gradients).for_each(|(p, g)| *p -= g);
        assert!(at.step != 2 || gradients[0] != 2.0, "a panic of a test");
    }
}

#[test]
fn a_rule_that_panics_leaves_nothing_to_commit() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let runtime = runtime(16, 64);
    let state = state(&runtime, &folder.path().join("state"));
    let make = || {
        let group = Group::new(Panics, Schedule::constant(1.0)).parameter("w", &[60_000]);
        Optimizer::builder(&runtime).group(group).threads(count(2)).open_in(&state)
    };
    let mut optimizer = make().unwrap();
    optimizer.accumulate("w", 0, &vec![1.0; 60_000], 1.0).unwrap();
    optimizer.step(1.0).unwrap();
    optimizer.commit(&json!("one")).unwrap();
    optimizer.accumulate("w", 0, &vec![1.0; 60_000], 1.0).unwrap();
    optimizer.accumulate("w", 30_000, &vec![1.0; 30_000], 1.0).unwrap();
    let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| optimizer.step(1.0)));
    assert!(panics.is_err());
    assert!(optimizer.step(1.0).unwrap_err().to_string().contains("panicked"));
    assert!(optimizer.commit(&Value::Null).is_err() && optimizer.accumulate("w", 0, &[1.0], 1.0).is_err());
    assert!(optimizer.drop_gradients().is_err());
    // Nobody else takes it for whole either.
    drop(optimizer);
    assert!(make().unwrap_err().to_string().contains("another step"));
    state.rollback().unwrap();
    let mut optimizer = make().unwrap();
    assert_eq!((optimizer.steps(), optimizer.program()), (1, &json!("one")));
    assert_eq!(bits(&runtime, &optimizer, "w"), vec![(-1f32).to_bits(); 60_000]);
    // A state that was committed in the middle of a step, by hand, is refused by a roll back too.
    let mut note: Value = serde_json::from_slice(&state.note()).unwrap();
    note["optimizer"]["in_step"] = json!(true);
    state.set_note(&serde_json::to_vec(&note).unwrap());
    state.commit().unwrap();
    assert!(optimizer.rollback().unwrap_err().to_string().contains("another step"));
}

/// An optimizer is dropped with steps that were not committed, and opened again in the same process.
#[test]
fn regression_the_folder_knows_of_steps_that_were_not_committed() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let runtime = runtime(16, 60);
    let state = state(&runtime, &folder.path().join("state"));
    let mut optimizer = three_groups(&runtime).open_in(&state).unwrap();
    initialise(&runtime, &mut optimizer);
    for step in 1..=2 {
        assert_eq!(optimizer.steps(), step - 1);
        add_gradients(&optimizer, step);
        optimizer.step(1.0).unwrap();
        drop(optimizer);
        optimizer = three_groups(&runtime).open_in(&state).unwrap();
    }
    assert_eq!(all_bits(&runtime, &optimizer), by_hand(2, DType::F32, 1e9).0);
}

/// A call that fails when it has added some of its gradients: they are not used.
#[test]
fn gradients_that_were_added_in_part_are_refused() {
    let faults = Faults::new();
    let page = Bytes::kib(16);
    let runtime = Runtime::builder()
        .page_size(PageSize::new(page).unwrap())
        .device_budget(Bytes::new(page.get() * 10))
        .store(outcore::store::StoreOptions::new(outcore::IoBackend::Threads).hook(faults.clone()))
        .open()
        .unwrap();
    let group = Group::new(Sgd::default(), Schedule::constant(1.0)).parameter("w", &[200_000]);
    let mut optimizer = Optimizer::builder(&runtime).group(group).threads(count(1)).open().unwrap();
    let mut torn = 0;
    for seed in 0..20 {
        optimizer.accumulate("w", 0, &vec![1.0; 200_000], 1.0).unwrap();
        faults.random(Rng::new(seed), 10);
        let added = optimizer.accumulate("w", 0, &vec![1.0; 200_000], 1.0);
        faults.off();
        if added.is_err() {
            if let Err(error) = optimizer.step(1.0) {
                torn += 1;
                assert!(error.to_string().contains("some of its gradients"), "{error}");
            }
            optimizer.drop_gradients().unwrap();
        } else {
            optimizer.drop_gradients().unwrap();
        }
    }
    assert!(torn > 0, "no call failed on its way");
}

fn is_shared<T: Send + Sync>() {}

#[test]
fn an_optimizer_may_go_to_other_threads() {
    is_shared::<Optimizer>();
}
