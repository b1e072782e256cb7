//! A draft model changes how many passes an answer takes, and none of its bits.

use super::*;

/// A model whose sequences are longer than those of the small one, for `--model`.
fn drafted() -> Spec {
    Spec { context: 512, ..spec() }
}

fn written(name: &str, spec: &Spec) -> String {
    let path = place(name);
    spec.write_gguf(&path).unwrap();
    text(&path).to_owned()
}

fn held(run: &Value, by: &str, what: &str) -> u64 {
    run["drafts"][by][what].as_u64().unwrap()
}

const GREEDY: &str = "--temperature 0";
const BY_CHANCE: &str = "--temperature 0.3 --seed 5";

#[test]
fn a_draft_model_changes_no_bit_of_an_answer() {
    let ways = ["", "--paged-kv", "--draft-tokens 1", "--draft-tokens 16 --device-budget 256KiB"];
    let ways = ways.into_iter().flat_map(|way| [(GREEDY, way), (BY_CHANCE, way)]);
    changes_no_bit("llama", &drafted(), &ways.collect::<Vec<_>>());
}

/// The tokens of a pass that verifies draw experts together, of which a third fit.
#[test]
fn a_draft_model_changes_no_bit_of_a_mixtures_answer() {
    let experts = Some(Experts { count: 16, used: 3, fused: false });
    let spec = Spec { arch: Arch::Qwen3Moe, experts, ..drafted() };
    let few = "--draft-tokens 16 --device-budget 768KiB --page-size 64KiB";
    changes_no_bit("mixture", &spec, &[(GREEDY, ""), (GREEDY, few), (BY_CHANCE, "--paged-kv")]);
}

/// What is no longer seen by layers with a window may have been a draft that did not hold.
#[test]
fn a_draft_model_changes_no_bit_of_an_answer_within_windows() {
    let spec = Spec { arch: Arch::Gemma3, layers: 6, ..drafted() };
    changes_no_bit("windows", &spec, &[(GREEDY, "--draft-tokens 16"), (GREEDY, "--paged-kv"), (BY_CHANCE, "")]);
}

/// Answers of this model are the same with either draft model as without, each with these choices and options.
fn changes_no_bit(name: &str, spec: &Spec, ways: &[(&str, &str)]) {
    let model = written(&format!("drafted-{name}.gguf"), spec);
    // All of its greedy drafts hold, but it sees few tokens at a time; those of the other one hold by chance.
    let same = written(&format!("draft-same-{name}.gguf"), &Spec { context: 48, ..spec.clone() });
    let other = written(&format!("draft-other-{name}.gguf"), &Spec { layers: 1, seed: 8, ..drafted() });
    // Whether drafts pay goes by the time that passes take, so one run may have none.
    let mut held_of_same = 0;
    for (choice, more) in ways {
        let base = format!("--model {model} --prompt-tokens 100,3,55,7,9,13,19 --tokens 150 {choice}");
        let run = |more: &str| json_of(&format!("{base} {more}").split_whitespace().collect::<Vec<_>>());
        // Keys and values in blocks have other last bits than those in none.
        let alone = run(more);
        assert!(alone["drafts"].is_null(), "{alone}");
        for draft in [&same, &other] {
            let beside = run(&format!("--draft-model {draft} {more}"));
            assert_eq!(words(&beside), words(&alone), "{choice} {more} {draft}: {beside}");
            let [lookup, model] =
                ["lookup", "model"].map(|by| [held(&beside, by, "drafted"), held(&beside, by, "accepted")]);
            assert!(lookup[1] <= lookup[0] && model[1] <= model[0], "{beside}");
            held_of_same += if *choice == GREEDY && *draft == same { model[1] } else { 0 };
            assert!(beside["drafts"]["seconds"].as_f64().unwrap() >= 0.0, "{beside}");
        }
    }
    assert!(held_of_same > 0, "no draft of the same model held");
}

#[test]
fn draft_models_that_cannot_be_used_are_refused() {
    let model = written("drafted-refused.gguf", &drafted());
    let run = |more: &[&str]| generate(&[&["--model", &model, "--prompt", "Hello", "--tokens", "8"], more].concat());
    // A vocabulary of another size, and one with other words.
    let larger = written("draft-vocab.gguf", &Spec { vocab: 600, ..drafted() });
    let wanted = ["draft-vocab.gguf", "another vocabulary", "600 tokens", "300", "--draft-model"];
    refused(&run(&["--draft-model", &larger]), &wanted);
    if let Some(real) = real_model() {
        let wanted = ["SmolLM2", "another vocabulary", "token 0 is", "--draft-model"];
        refused(&run(&["--draft-model", text(&real)]), &wanted);
    }
    // It takes more memory than there is, which holds the model alone.
    let big = Spec { dim: 512, ffn_dim: 1408, layers: 8, dtype: WeightType::BF16, ..drafted() };
    let big = written("draft-big.gguf", &big);
    let memory = ["--memory", "48MiB"];
    stdout_of(&run(&memory));
    let wanted = ["draft-big.gguf", "of memory", "leave --draft-model out", "more --memory"];
    refused(&run(&[&memory[..], &["--draft-model", &big]].concat()), &wanted);
    refused(&run(&["--draft-model", &model, "--draft-tokens", "0"]), &["--draft-tokens 0", "from 1 to 16"]);
    refused(&run(&["--draft-model", &model, "--draft-tokens", "17"]), &["--draft-tokens 17", "from 1 to 16"]);
    refused(&run(&["--draft-model", &model, "--device", "cuda"]), &["--draft-model", "GPU", "--device host"]);
    refused(&run(&["--draft-model", "nowhere.gguf"]), &["nowhere.gguf"]);
}
