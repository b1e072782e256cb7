//! `examples/candle.rs`: candle computes over pinned pages what the engine of this crate computes, in less memory than
//! the model has, and what it cannot read it refuses.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;

use clap::Parser;
use example::{Args, Llama, Pinned};
use outcore::machine::ProcessMemory;
use outcore::{Bytes, Runtime};
use outcore_llm::synthetic::Spec;
use outcore_llm::{Arch, KvType, Model, ModelFiles, Options, PlainWeights, Session, WeightType, argmax};
use outcore_testkit::harness::alone;
use outcore_testkit::models;

#[path = "../../candle.rs"]
#[expect(dead_code, reason = "its main is not called")]
mod example;

/// A sixth of the real model's file.
const MEMORY: &str = "16MiB";

/// Types that candle does not have.
const ABSENT: [WeightType; 3] = [WeightType::IQ4_NL, WeightType::IQ4_XS, WeightType::MXFP4];

fn session(files: &ModelFiles) -> Session {
    let weights = Arc::new(PlainWeights::read(files).unwrap());
    let model = Model::load(files, weights, Options::default()).unwrap();
    Session::new(Arc::new(model), 64, KvType::F32).unwrap()
}

#[test]
fn its_words_are_those_of_the_other_engine() {
    let Some(path) = models::fetched_model() else { return };
    // A user's question, in the model's template.
    let prompt = [1, 4093, 198, 36971, 5798, 3500, 281, 582, 1890, 8510, 30, 2, 198, 1, 520, 9531, 198];
    let files = ModelFiles::open(path).unwrap();
    let made = Llama::open(&files, MEMORY.parse().unwrap()).unwrap().continued(&prompt, 12).unwrap();
    let mut session = session(&files);
    let mut expected = vec![argmax(&session.forward(&prompt).unwrap())];
    while expected.len() < made.len() {
        expected.push(argmax(&session.forward(&expected[expected.len() - 1..]).unwrap()));
    }
    assert_eq!(made, expected);
}

/// The two round activations in different ways.
#[test]
fn of_every_type_of_weights_it_makes_the_same_logits() {
    let folder = tempfile::tempdir().unwrap();
    for dtype in WeightType::ALL.into_iter().filter(|dtype| !ABSENT.contains(dtype)) {
        let path = folder.path().join(format!("{dtype}.gguf"));
        Spec::small(Arch::Llama, dtype).write_gguf(&path).unwrap();
        let files = ModelFiles::open(path).unwrap();
        let mut session = session(&files);
        let mut llama = Llama::open(&files, Bytes::mib(4)).unwrap();
        for tokens in [&[72, 101, 108, 108, 111][..], &[7], &[299, 0]] {
            let made: Vec<f32> = llama.logits(tokens).unwrap().to_vec1().unwrap();
            let expected = session.forward(tokens).unwrap();
            assert_eq!(made.len(), expected.len());
            let most = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
            let worst = made.iter().zip(&expected).fold(0f32, |worst, (a, b)| worst.max((a - b).abs()));
            println!("{dtype} {tokens:?}: differs by {worst} of {most}");
            assert!(most.is_finite() && worst <= 0.1 * most, "{dtype} {tokens:?}: differs by {worst} of {most}");
        }
    }
}

#[test]
fn it_takes_less_than_half_of_the_file() {
    let Some(path) = models::fetched_model() else { return };
    alone("it_takes_less_than_half_of_the_file", || {
        example::run(args(&path, MEMORY)).unwrap();
        let (peak, file) = (ProcessMemory::now().unwrap().peak.get(), path.metadata().unwrap().len());
        println!("at most {peak} bytes resident, of a file of {file}");
        assert!(2 * peak < file, "at most {peak} bytes were resident, of a file of {file}");
    });
}

fn args(path: &Path, memory: &str) -> Args {
    Args::try_parse_from(["candle".as_ref(), path.as_os_str(), "--memory".as_ref(), memory.as_ref()]).unwrap()
}

/// What the example says of this file.
fn refused(path: &Path, memory: &str) -> String {
    example::run(args(path, memory)).unwrap_err().to_string()
}

#[test]
fn what_it_cannot_use_it_refuses() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let says = |said: String, parts: &[&str]| assert!(parts.iter().all(|part| said.contains(part)), "{said}");

    std::fs::write(at("text.gguf"), "no model").unwrap();
    says(refused(&at("text.gguf"), MEMORY), &["text.gguf: the file is not a model", "(outcore reads GGUF"]);
    says(refused(&at("absent.gguf"), MEMORY), &["absent.gguf", "(check the path)"]);

    Spec::small(Arch::Llama, WeightType::Q8_0).write_gguf(&at("llama.gguf")).unwrap();
    says(refused(&at("llama.gguf"), "1MiB"), &["1.0 MiB", "2.0 MiB", "give at least"]);
    // A budget of a page, and a layer that lies in two.
    let large = Spec { dim: 512, ffn_dim: 2048, ..Spec::small(Arch::Llama, WeightType::F32) };
    large.write_gguf(&at("large.gguf")).unwrap();
    says(refused(&at("large.gguf"), "2MiB"), &["are wanted at once", "(2.0 MiB)", "raise the device budget"]);

    for dtype in ABSENT {
        Spec::small(Arch::Llama, dtype).write_gguf(&at("absent-type.gguf")).unwrap();
        let wanted = format!("candle has no blocks of {dtype} (take the model in another type)");
        says(refused(&at("absent-type.gguf"), MEMORY), &["tensor \"", &wanted]);
    }

    let mut bytes = std::fs::read(at("llama.gguf")).unwrap();
    let key = b"general.architecture";
    let key_at = bytes.windows(key.len()).position(|window| window == key).unwrap();
    // Behind the key are the value's type and its length.
    bytes[key_at + key.len() + 12..][..5].copy_from_slice(b"mamba");
    std::fs::write(at("mamba.gguf"), bytes).unwrap();
    says(refused(&at("mamba.gguf"), MEMORY), &["mamba.gguf", "\"mamba\" is not supported", "run another model"]);
    Spec::small(Arch::Qwen2, WeightType::Q8_0).write_gguf(&at("qwen2.gguf")).unwrap();
    says(refused(&at("qwen2.gguf"), MEMORY), &["is no GGUF of the architecture llama (take"]);
    Spec::small(Arch::Llama, WeightType::F16).write_safetensors(&at("folder"), 1).unwrap();
    let files = ModelFiles::open(at("folder")).unwrap();
    let said = Llama::open(&files, Bytes::mib(4)).err().unwrap().to_string();
    says(said, &["folder is no GGUF", "run `generate`"]);

    let mut llama = Llama::open(&ModelFiles::open(at("llama.gguf")).unwrap(), Bytes::mib(4)).unwrap();
    says(llama.continued(&[], 1).unwrap_err().to_string(), &["no token to read", "(give a longer prompt)"]);
    says(llama.continued(&[300], 1).unwrap_err().to_string(), &["token_embd.weight", "which has 300", "(ask for rows"]);
}

#[test]
fn a_tensor_that_is_not_aligned_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let number = |number: u32| number.to_le_bytes().to_vec();
    // Version 3, a tensor, a key: of type u32, the alignment. The tensor: a dimension of 8, type f32, offset 0.
    for (name, aligned) in [("w", false), ("www", true)] {
        let parts = [b"GGUF".to_vec(), number(3), number(1), number(0), number(1), number(0)];
        let key = [text("general.alignment"), number(4), number(1)];
        let tensor = [text(name), number(1), 8u64.to_le_bytes().to_vec(), number(0), 0u64.to_le_bytes().to_vec()];
        let header = [parts.concat(), key.concat(), tensor.concat()].concat();
        println!("the tensor is at byte {}", header.len());
        std::fs::write(&path, [header, vec![0; 32]].concat()).unwrap();
        let runtime = Runtime::builder().device_budget(Bytes::mib(4)).open().unwrap();
        let tensors = [runtime.open_model(&path).unwrap().tensor(name).unwrap()];
        let set = Arc::new(runtime.pin(&tensors).wait().unwrap());
        let made = Pinned { tensors: &tensors, set }.qtensor(name).map_err(|error| error.to_string());
        match made {
            Ok(_) => assert!(aligned),
            Err(said) => {
                assert!(!aligned && said.contains("\"w\": blocks of F32 do not begin at a multiple of 4 bytes"))
            }
        }
    }
}
