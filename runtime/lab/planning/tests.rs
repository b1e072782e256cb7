//! Forecasts, advice and targets of whole jobs.

use super::*;
use crate::error::ErrorKind;
use crate::ids::{Bytes, PageSize};
use crate::machine;
use crate::sim::MachineModel;
use outcore::DType;
use outcore::device::HostDevice;
use outcore::stats::page_within;

fn llama_70b(work: Work) -> Job {
    let given = Given {
        parameters: Parameters::new(69_000_000_000).unwrap(),
        dtype: DType::BF16,
        layers: Some(80),
        hidden: Some(8192),
        heads: Some(64),
        kv_heads: Some(8),
        ffn: Some(28_672),
        vocab: Some(32_000),
        gated: true,
        experts: None,
    };
    Job { shape: Shape::estimate(&given).unwrap(), work, context: 4096, batch: 1, headroom_percent: 20 }
}

fn infer() -> Job {
    llama_70b(Work::Infer { kv: KvType::F16 })
}

fn train(optimizer: Optimizer, checkpointing: Checkpointing) -> Job {
    llama_70b(Work::Train { optimizer, checkpointing })
}

fn resources(device: u64, host: u64, disk: &str, link: Option<&str>) -> Resources {
    Resources {
        device: Bytes::gib(device),
        host: Bytes::gib(host),
        disk: disk.parse().unwrap(),
        disk_write: None,
        disk_latency: std::time::Duration::ZERO,
        disk_depth: outcore::store::QueueDepth::DEFAULT,
        link: link.map(|link| link.parse().unwrap()),
        link_shared: false,
        link_latency: std::time::Duration::ZERO,
        compute: None,
    }
}

fn run(job: &Job, resources: &Resources) -> Run {
    forecast(job, resources).unwrap().run.unwrap()
}

/// Checks that two numbers differ by no more than what the first pages of a pass and the rounding to pages change.
#[track_caller]
fn near(found: f64, wanted: f64) {
    assert!((found - wanted).abs() <= 0.03 * wanted, "{found} {wanted}");
}

fn bytes(bytes: Bytes) -> f64 {
    bytes.get() as f64
}

#[test]
fn what_fits_does_not_move() {
    let (job, mut resources) = (infer(), resources(400, 0, "1GB/s", Some("10GB/s")));
    let found = run(&job, &resources);
    assert!(found.is_resident() && !found.paged.kv);
    assert_eq!(
        (found.paged.filled, found.paged.disk_read, found.recommended.host_budget),
        (Bytes::ZERO, Bytes::ZERO, Bytes::ZERO)
    );
    assert_eq!((found.pass_s(), found.bottleneck(), found.tokens_per_second()), (None, None, None));
    // No more frames than there are pages.
    assert_eq!(
        found.recommended.device_budget.get(),
        PageSize::DEFAULT.pages_for(138_000_000_000) * PageSize::DEFAULT.bytes()
    );
    assert!(advice(&job, &resources, &forecast(&job, &resources).unwrap()).unwrap().is_empty());

    resources.compute = Some(Compute::Seconds(0.25));
    let found = run(&job, &resources);
    assert_eq!((found.pass_s(), found.bottleneck()), (Some(0.25), Some(Bottleneck::Compute)));
    assert_eq!(found.tokens_per_second(), Some(4.0));
}

#[test]
fn the_least_total_that_fits_is_the_sum_of_the_classes() {
    let job = infer();
    let memory = job.memory(true).unwrap();
    // In whole pages, less what rounding the headroom loses.
    let mut resources = resources(0, 0, "1GB/s", Some("10GB/s"));
    resources.device = memory.total + Bytes::mib(8);
    assert!(run(&job, &resources).is_resident());
    resources.device = memory.total.saturating_sub(Bytes::mib(8));
    assert!(!run(&job, &resources).is_resident());
}

#[test]
fn what_is_missing_comes_over_the_links_of_its_tier() {
    let job = infer();
    let whole = 138_000_000_000f64;

    let found = run(&job, &resources(48, 0, "2GB/s", Some("20GB/s")));
    let kept = 48.0 * 1.073_741_824e9 / 1.2 - 1.342_177_28e9 - 0.46e9;
    near(bytes(found.paged.filled), whole - kept);
    near(bytes(found.paged.disk_read), bytes(found.paged.filled));
    assert_eq!((found.paged.copied_down, found.paged.disk_written), (Bytes::ZERO, Bytes::ZERO));
    assert_eq!(found.bottleneck(), Some(Bottleneck::Disk));
    near(found.pass_s().unwrap(), bytes(found.paged.disk_read) / 2e9);
    near(found.link_s.unwrap(), bytes(found.paged.filled) / 20e9);
    // It computes in no time, so far as is known.
    assert_eq!(found.waited_s(), found.pass_s());

    // Tiers are exclusive: the host's frames add to the device's.
    let with_host = run(&job, &resources(48, 60, "2GB/s", Some("20GB/s")));
    near(bytes(with_host.paged.filled), bytes(found.paged.filled));
    near(bytes(with_host.paged.in_host), 60.0 * 1.073_741_824e9 / 1.2);
    near(bytes(with_host.paged.disk_read), bytes(found.paged.disk_read) - bytes(with_host.paged.in_host));

    // All of it is below the device: then the link is the bottleneck.
    let all = run(&job, &resources(48, 200, "2GB/s", Some("20GB/s")));
    assert_eq!((all.paged.disk_read, all.bottleneck()), (Bytes::ZERO, Some(Bottleneck::Link)));
    assert!(all.recommended.host_budget.get() - all.paged.streamed.get() < 64 << 20, "no more than is of use");
}

#[test]
fn what_takes_about_as_long_as_the_bottleneck_is_named() {
    let at = |compute: f64| {
        run(&infer(), &Resources { compute: Some(Compute::Seconds(compute)), ..resources(48, 0, "2GB/s", None) })
    };
    let disk = at(0.001).disk_s;
    let found = [0.4, 0.6, 1.5, 2.5].map(|share| (at(disk * share).bottleneck(), at(disk * share).beside()));
    let (compute, disk) = (Some(Bottleneck::Compute), Some(Bottleneck::Disk));
    assert_eq!(found, [(disk, None), (disk, compute), (compute, disk), (compute, None)]);
}

/// A pass computes or waits for pages. What it waits goes on beside computing.
#[test]
fn a_pass_is_computing_and_waiting() {
    let at = |compute: f64| {
        run(&infer(), &Resources { compute: Some(Compute::Seconds(compute)), ..resources(48, 0, "2GB/s", None) })
    };
    let disk = at(0.001).disk_s;
    for share in [0.4, 1.0, 2.5] {
        let found = at(disk * share);
        let (pass, waited) = (found.pass_s().unwrap(), found.waited_s().unwrap());
        // Computing is slower while the disk reads into the same memory. A part of the job stands for all of it.
        assert!(waited >= 0.0 && pass - waited >= 0.95 * disk * share, "{share}: {waited} of {pass}");
    }
    let share = |found: &Run| found.waited_s().unwrap() / found.pass_s().unwrap();
    let [quick, even, slow] = [0.001, disk, 2.5 * disk].map(|compute| share(&at(compute)));
    assert!(quick > 0.95 && quick > even && slow < 0.01, "{quick} {even} {slow}");
}

#[test]
fn budgets_follow_the_runtimes_rules() {
    let found = run(&infer(), &resources(48, 60, "2GB/s", Some("20GB/s")));
    let frames = (found.recommended.device_budget.get() / found.recommended.page_size.bytes()) as u32;
    assert_eq!(found.recommended.device_budget.get() % found.recommended.page_size.bytes(), 0);
    assert_eq!(
        found.recommended.lookahead.get(),
        u64::from(outcore::Lookahead::Auto.pages(found.recommended.page_size, frames)) << 21
    );
    assert_eq!(found.recommended.page_size, PageSize::DEFAULT);
    assert_eq!(found.recommended.policy, outcore::PolicyKind::default());

    // On the host small budgets have smaller pages; a GPU's pages have the default size.
    let given = Given {
        parameters: Parameters::new(135_000_000).unwrap(),
        dtype: DType::Q4_1,
        layers: Some(30),
        hidden: Some(576),
        heads: Some(9),
        kv_heads: Some(3),
        ffn: Some(1536),
        vocab: Some(49_152),
        gated: true,
        experts: None,
    };
    let shape = Shape::estimate(&given).unwrap();
    let job = Job { shape, work: Work::Infer { kv: KvType::F16 }, context: 64, batch: 1, headroom_percent: 0 };
    let mut resources = resources(0, 0, "2GB/s", None);
    resources.device = Bytes::mib(20);
    let small = run(&job, &resources);
    assert_eq!(small.recommended.page_size.bytes(), 1 << 20, "12 frames of a budget of some 16 MiB");
    assert!(
        small.recommended.device_budget > Bytes::mib(12) && small.recommended.device_budget < Bytes::mib(20),
        "{}",
        small.recommended.device_budget
    );
    assert_eq!(small.link_s, None);
}

#[test]
fn keys_and_values_that_do_not_fit_are_paged_too() {
    let mut job = infer();
    job.batch = 64;
    let found = run(&job, &resources(48, 0, "2GB/s", Some("20GB/s")));
    let kv = Bytes::mib(1280 * 64);
    assert!(found.paged.kv);
    assert_eq!((found.recommended.scratch_file, found.paged.all), (kv, job.shape.used + kv));
    assert!(found.paged.copied_down > Bytes::ZERO && found.paged.copied_down < kv);
}

#[test]
fn a_step_moves_what_training_changes_both_ways() {
    let job = train(Optimizer::AdamMixed, Checkpointing::Full);
    // Hardly any page has a place.
    let found = run(&job, &resources(12, 0, "2GB/s", Some("20GB/s")));
    let p = 69e9;
    // Weights (2 bytes) are filled three times, gradients (2) twice, the optimizer's state (12) once; each is changed
    // once.
    let (filled, down) = (p * (3.0 * 2.0 + 2.0 * 2.0 + 12.0), p * 16.0);
    near(bytes(found.paged.filled), filled);
    near(bytes(found.paged.copied_down), down);
    near(bytes(found.paged.disk_read), bytes(found.paged.filled));
    near(bytes(found.paged.disk_written), bytes(found.paged.copied_down));
    near(found.disk_s, bytes(found.paged.filled + found.paged.copied_down) / 2e9);
    assert_eq!((found.recommended.scratch_file, found.tokens), (Bytes::new(16 * 69_000_000_000), 4096));

    // Pages that are used more than once stay first: with room for weights and gradients only the state moves.
    let roomy = run(&job, &resources(400, 0, "2GB/s", Some("20GB/s")));
    near(bytes(roomy.paged.filled), bytes(roomy.paged.copied_down));
    near(bytes(roomy.paged.filled), bytes(roomy.paged.streamed));
}

#[test]
fn a_job_that_cannot_run_says_what_it_needs() {
    let job = train(Optimizer::AdamMixed, Checkpointing::None);
    let small = resources(24, 64, "2GB/s", Some("20GB/s"));
    let found = forecast(&job, &small).unwrap();
    assert!(found.run.is_none());
    let mut enough = small;
    enough.device = found.least_device + Bytes::new(1);
    assert!(forecast(&job, &enough).unwrap().run.is_some());
    enough.device = found.least_device.saturating_sub(Bytes::new(1 << 12));
    assert!(forecast(&job, &enough).unwrap().run.is_none());

    let advised = advice(&job, &small, &found).unwrap();
    assert!(advised.iter().any(|outcome| outcome.change == Change::Checkpointing(Checkpointing::Full)), "{advised:?}");
    assert!(advised.iter().all(|outcome| outcome.speedup.is_none()));
}

#[test]
fn advice_is_what_the_forecast_says_of_the_changed_job() {
    let (job, resources) = (infer(), resources(48, 60, "2GB/s", Some("20GB/s")));
    let now = forecast(&job, &resources).unwrap();
    let before = now.run.unwrap().tokens_per_second().unwrap();
    let advised = advice(&job, &resources, &now).unwrap();
    assert!(advised.len() >= 5, "{advised:?}");
    for outcome in &advised {
        let (job, resources) = outcome.change.made(&job, &resources);
        let after = run(&job, &resources);
        assert_eq!(after, outcome.run, "{}", outcome.change);
        assert_eq!(outcome.speedup, after.tokens_per_second().map(|after| after / before), "{}", outcome.change);
    }
    assert!(advised.is_sorted_by(|a, b| {
        let gain = |outcome: &Outcome| outcome.run.tokens_per_second().unwrap_or(f64::INFINITY);
        gain(a) >= gain(b)
    }));
    let of = |wanted: &str| advised.iter().find(|outcome| outcome.change.to_string() == wanted).unwrap();
    // The disk is the bottleneck: twice the disk is twice the speed, and a faster link does not help.
    assert!((of("a disk of 3.7 GiB/s").speedup.unwrap() - 2.0).abs() < 0.02);
    assert!(!advised.iter().any(|outcome| matches!(outcome.change, Change::Link(_))));
    assert!(of("weights in Q8_0").speedup.is_none_or(|speedup| speedup > 2.0));
    assert!(of("+16.0 GiB host memory").speedup.unwrap() > 1.2);
}

#[test]
fn the_changes_that_reach_a_target_reach_it_and_less_does_not() {
    let (job, resources) = (infer(), resources(48, 60, "2GB/s", Some("20GB/s")));
    let now = forecast(&job, &resources).unwrap();
    let before = now.run.unwrap().tokens_per_second().unwrap();
    let found = target(&job, &resources, &now, before * 1.5).unwrap();
    assert_eq!(found.reached, Some(false));
    assert!(found.ways.len() >= 4, "{found:?}");
    for way in &found.ways {
        assert!(way.run.tokens_per_second().is_none_or(|after| after >= before * 1.5), "{}", way.change);
        let less = match way.change {
            Change::MoreDevice(more) => Change::MoreDevice(Bytes::new(more.get() / 10 * 8)),
            Change::MoreHost(more) => Change::MoreHost(Bytes::new(more.get() / 10 * 8)),
            Change::Disk(disk) => Change::Disk(disk.times(0.8)),
            _ => continue,
        };
        let (job, resources) = less.made(&job, &resources);
        assert!(run(&job, &resources).tokens_per_second().unwrap() < before * 1.5, "{less} suffices too");
    }
    assert_eq!(target(&job, &resources, &now, before * 0.9).unwrap().reached, None, "computing is not known");

    let known = Resources { compute: Some(Compute::Seconds(0.5)), ..resources };
    let now = forecast(&job, &known).unwrap();
    assert_eq!(target(&job, &known, &now, before * 0.9).unwrap().reached, Some(true));
    let beyond = target(&job, &known, &now, 100.0).unwrap();
    assert_eq!((beyond.reached, beyond.ways), (Some(false), Vec::new()), "computing forbids it");
}

#[test]
fn steps_of_fewer_tokens_compute_less() {
    let job = train(Optimizer::AdamMixed, Checkpointing::Full);
    let known = Resources { compute: Some(Compute::Seconds(8.0)), ..resources(48, 0, "2GB/s", Some("20GB/s")) };
    assert_eq!(Change::Context(1024).made(&job, &known).1.compute, Some(Compute::Seconds(2.0)));
    assert_eq!(Change::Batch(2).made(&job, &known).1.compute, Some(Compute::Seconds(16.0)));
    assert_eq!(Change::Batch(2).made(&infer(), &known).1.compute, Some(Compute::Seconds(8.0)));
}

fn mixtral(active: u64) -> Job {
    let shape = Shape::estimate(&Given::mixtral(active).unwrap()).unwrap();
    Job { work: Work::Infer { kv: KvType::F16 }, shape, ..infer() }
}

#[test]
fn of_experts_a_pass_fills_what_it_is_expected_to_draw() {
    let resources = Resources { compute: Some(Compute::Seconds(0.1)), ..resources(24, 200, "2GB/s", Some("20GB/s")) };
    let mut job = mixtral(2);
    let experts = job.shape.experts.unwrap().weights.get() as f64;
    let mut before = 0.0;
    for batch in [1, 4, 16] {
        job.batch = batch;
        let found = run(&job, &resources);
        let share = 1.0 - 0.75f64.powi(batch as i32);
        assert!(!found.is_resident() && !found.paged.ahead && !found.paged.kv, "{found:?}");
        // The policy finds those that it kept less often than by chance, where a pass uses more than there is room for.
        let least = bytes(found.paged.streamed) * share;
        let filled = bytes(found.paged.filled);
        assert!(0.9 * least < filled && filled < 1.1 * bytes(found.paged.used), "{batch}: {filled} {least}");
        let used = job.shape.used.get() as f64 - (1.0 - share) * experts;
        assert!((found.paged.used.get() as f64 / used - 1.0).abs() < 1e-6, "{batch}: {} {used}", found.paged.used);
        assert_eq!((found.paged.all, found.recommended.policy), (job.shape.used, outcore::PolicyKind::Kv));
        assert!(found.paged.filled.get() as f64 > before, "more sequences draw more");
        before = found.paged.filled.get() as f64;
        // No fills while it computes: which experts are needed is known only when they are wanted. A page comes when
        // another has left.
        let (link, disk, pass) = (found.link_s.unwrap(), found.disk_s, found.pass_s().unwrap());
        assert!(0.1 + link.max(disk) < pass * 1.02 && pass < 0.1 + 2.0 * (link + disk), "{link} {disk} {pass}");
        assert_ne!(found.beside(), Some(Bottleneck::Compute));
    }
    // With all experts active it is a dense model.
    let (dense, all) = (mixtral(8), run(&mixtral(8), &resources));
    assert!(all.paged.ahead && all.recommended.policy == outcore::PolicyKind::Plan && all.paged.used == all.paged.all);
    let shape = Shape { experts: None, ffn: 8 * 14_336, ..dense.shape.clone() };
    let without = run(&Job { shape, ..dense }, &resources);
    near(bytes(all.paged.filled), bytes(without.paged.filled));
    near(bytes(all.paged.disk_read), bytes(without.paged.disk_read));
    // If all experts have a frame, nothing is filled.
    let roomy = run(&mixtral(2), &Resources { device: Bytes::gib(200), ..resources });
    assert!(
        roomy.is_resident()
            && roomy.paged.ahead
            && roomy.paged.used < roomy.paged.all
            && roomy.paged.filled == Bytes::ZERO
    );
}

#[test]
fn policies_are_those_that_suit_the_job() {
    use outcore::PolicyKind;
    let resources = resources(24, 0, "2GB/s", Some("20GB/s"));
    let of = |job: &Job| run(job, &resources).recommended.policy;
    let paged = |job: Job| Job { batch: 64, ..job };
    let step = train(Optimizer::AdamMixed, Checkpointing::Full);
    assert_eq!([of(&infer()), of(&step)], [PolicyKind::Plan; 2]);
    assert_eq!(of(&mixtral(2)), PolicyKind::Kv);
    assert!(run(&paged(infer()), &resources).paged.kv);
    assert_eq!(of(&paged(infer())), PolicyKind::Shares);
    let reasons =
        [infer(), mixtral(2), paged(infer()), step].map(|job| run(&job, &resources).recommended.policy_because);
    assert!(reasons.iter().enumerate().all(|(at, reason)| !reasons[..at].contains(reason)), "{reasons:?}");
}

#[test]
fn a_machine_says_what_is_left_out() {
    let machine = |name| MachineModel::named(name).unwrap();
    let of = |name| Resources::of(&machine(name)).unwrap();
    let h200 = of("h200");
    assert_eq!((h200.device, h200.host), (Bytes::new(141_000_000_000), Bytes::new(1_024_000_000_000)));
    assert_eq!(h200.disk_write.map(Bandwidth::bytes_per_second), Some(Bytes::new(3_500_000_000)));
    assert!(!h200.link_shared);
    // With one memory there is no second tier.
    assert_eq!((of("laptop").host, of("laptop").link), (Bytes::ZERO, None));
    assert_eq!((of("dgx-spark").host, of("dgx-spark").link_shared), (Bytes::ZERO, true));
    let broken =
        MachineModel { disk: crate::sim::DiskModel { read: Bytes::ZERO, ..machine("h200").disk }, ..machine("h200") };
    assert!(Resources::of(&broken).unwrap_err().to_string().contains("machine h200"));

    // A resident pass takes what its bytes take.
    let mut job = infer();
    job.shape = job.shape.stored_as(DType::Q8_0);
    let found = run(&job, &h200);
    assert!(found.is_resident());
    let used = job.shape.used.get() + job.memory(true).unwrap().kv.get();
    // Seven tensors a layer and the output are a step each.
    let seconds = used as f64 / 4.8e12 + 561.0 * 5e-6;
    assert!((found.pass_s().unwrap() - seconds).abs() < 1e-9, "{:?} {seconds}", found.pass_s());
    assert_eq!(found.bottleneck(), Some(Bottleneck::Compute));
    let advised = advice(&job, &h200, &forecast(&job, &h200).unwrap()).unwrap();
    // Twice the sequences read the weights once; smaller weights take less time to read.
    let gain = |wanted| advised.iter().find(|outcome| outcome.change == wanted).and_then(|outcome| outcome.speedup);
    assert!(gain(Change::Batch(2)) > Some(1.9) && gain(Change::Weights(DType::Q4_0)) > Some(1.5), "{advised:?}");
}

#[test]
fn what_is_written_and_what_shares_a_link_takes_its_own_time() {
    let job = train(Optimizer::AdamMixed, Checkpointing::Full);
    let even = resources(48, 0, "2GB/s", Some("20GB/s"));
    let (gb, now) = (1e9, run(&job, &even));
    let slow = Resources { disk_write: Some("1GB/s".parse().unwrap()), link_shared: true, ..even };
    let found = run(&job, &slow);
    let [read, written, filled, down] =
        [found.paged.disk_read, found.paged.disk_written, found.paged.filled, found.paged.copied_down]
            .map(|size| bytes(size) / gb);
    near(found.disk_s, read / 2.0 + written);
    near(found.link_s.unwrap(), (filled + down) / 20.0);
    near(now.link_s.unwrap(), filled.max(down) / 20.0);
    // A disk of twice the bandwidth reads and writes twice as fast.
    let (job, twice) = Change::Disk("4GB/s".parse().unwrap()).made(&job, &slow);
    near(run(&job, &twice).disk_s * 2.0, found.disk_s);
}

#[test]
fn quantised_weights_are_trained_as_floats_or_not_at_all() {
    for optimizer in Optimizer::ALL {
        let mut job = train(optimizer, Checkpointing::Full);
        job.shape.dtype = DType::Q4_K;
        match job.memory(false) {
            Ok(memory) => {
                let each = if optimizer == Optimizer::Adam { 4 } else { 2 };
                assert_eq!(memory.weights, Bytes::new(job.shape.parameters * each), "{optimizer}");
                assert_eq!(memory.gradients, memory.weights, "{optimizer}");
            }
            Err(error) => {
                assert!(matches!(optimizer, Optimizer::Sgd | Optimizer::Adam8), "{error}");
                assert_eq!(error.kind(), ErrorKind::Unsupported);
                assert!(error.to_string().contains("Q4_K"), "{error}");
                assert_eq!(forecast(&job, &resources(48, 0, "2GB/s", None)).unwrap_err().kind(), error.kind());
            }
        }
    }
}

/// Any numbers give an answer or an error, never a panic and never a NaN.
#[test]
fn extreme_jobs_have_an_answer_or_an_error() {
    const EXTREME: [u64; 6] = [1, 2, 1000, 1 << 24, 1 << 40, u64::MAX];
    const TOKENS: [(u64, u64); 5] = [(1, 1), (1000, 2), (2, 1 << 24), (1 << 40, 1000), (u64::MAX, u64::MAX)];
    let h200 = MachineModel::named("h200").unwrap().compute;
    let (mut refused, mut too_small, mut moving, mut resident) = (0, 0, 0, 0);
    for parameters in ["1", "7B", "1000T"] {
        for size in [None, Some(1), Some(1 << 24)] {
            let given = Given {
                parameters: parameters.parse().unwrap(),
                dtype: DType::F32,
                layers: size,
                hidden: size,
                heads: size,
                kv_heads: None,
                ffn: size,
                vocab: size,
                gated: false,
                experts: (parameters == "7B" && size.is_none()).then_some(GivenExperts {
                    count: 3,
                    active: Some(1),
                    ffn: None,
                }),
            };
            let shape = Shape::estimate(&given).unwrap();
            let inference = KvType::ALL.map(|kv| Work::Infer { kv });
            let training = Work::Train { optimizer: Optimizer::Adam8, checkpointing: Checkpointing::Selective };
            for work in inference.into_iter().chain([training]) {
                for (context, batch) in TOKENS {
                    for memory in EXTREME {
                        let job = Job { shape: shape.clone(), work, context, batch, headroom_percent: 20 };
                        let resources = Resources {
                            device: Bytes::new(memory),
                            host: Bytes::new(memory / 2),
                            disk: Bandwidth::new(Bytes::new(memory)).unwrap(),
                            disk_write: None,
                            disk_latency: std::time::Duration::ZERO,
                            disk_depth: outcore::store::QueueDepth::DEFAULT,
                            link: (memory % 2 == 0).then(|| Bandwidth::new(Bytes::new(batch)).unwrap()),
                            link_shared: batch == 2,
                            link_latency: std::time::Duration::ZERO,
                            compute: (context == 1000).then_some(Compute::Roofline(h200)),
                        };
                        let Ok(now) = forecast(&job, &resources) else {
                            refused += 1;
                            continue;
                        };
                        match now.run {
                            None => too_small += 1,
                            Some(run) if run.is_resident() => resident += 1,
                            Some(_) => moving += 1,
                        }
                        let seconds = now.run.and_then(|run| run.pass_s());
                        assert!(seconds.is_none_or(|seconds| seconds.is_finite() && seconds > 0.0), "{now:?}");
                        // Advice and targets forecast many times.
                        if moving % 8 != 1 {
                            continue;
                        }
                        let advised = advice(&job, &resources, &now).unwrap();
                        assert!(advised.iter().all(|outcome| outcome.speedup.is_none_or(f64::is_finite)));
                        if memory == 1 << 40 {
                            target(&job, &resources, &now, 10.0).unwrap();
                        }
                    }
                }
            }
        }
    }
    assert!(
        [refused, too_small, moving, resident].iter().all(|count| *count > 20),
        "{refused} {too_small} {moving} {resident}"
    );
}

/// A runtime that is given the planned budget opens, and chooses the same page size, whatever the experts.
#[test]
fn regression_planned_pages_are_no_smaller_than_mappings_allow() {
    let frames = HostDevice::frames_allowed(machine::MAX_MAP_COUNT);
    let mut mixture = infer();
    mixture.shape.experts = Some(Experts {
        count: 128,
        active: 8,
        ffn: 768,
        shared_ffn: 0,
        parameters: 60_000_000_000,
        weights: Bytes::new(120_000_000_000),
        piece: Some(Bytes::new(768 * 2048 * 9 / 16)),
    });
    for job in [infer(), mixture] {
        for device in [1, 8, 15, 26, 40, 70, 100, 300, 4000] {
            let found = run(&job, &resources(device, 0, "1GB/s", None));
            let planned = (device, found.recommended.device_budget, found.recommended.page_size);
            assert!(
                found.recommended.device_budget.get() / found.recommended.page_size.bytes() <= frames,
                "{planned:?}"
            );
            assert_eq!(
                page_within(found.recommended.device_budget, job.shape.used_piece(), None, frames),
                found.recommended.page_size,
                "{planned:?}"
            );
        }
    }
}
