//! The gradient of every element of every parameter, against differences of the loss in `f64`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod memory;

use candle_core::{D, DType, Device, Result as Computed, Tensor};
use memory::Memory;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use train::operations::{self, Positions};
use train::pass::{Micro, Pass};
use train::shape::{Parameter, Shape};

fn number(random: &mut ChaCha8Rng) -> f64 {
    f64::from(random.next_u32()) / f64::from(u32::MAX) - 0.5
}

fn of(shape: &Shape, random: &mut ChaCha8Rng) -> Memory {
    let mut memory = Memory::default();
    for (name, extents) in shape.all() {
        // Norms are around 1, so that every factor differs.
        let around = if extents.len() == 1 { 1.0 } else { 0.0 };
        let values: Vec<f64> = (0..extents.iter().product()).map(|_| around + number(random)).collect();
        memory.parameters.insert(name, Tensor::from_vec(values, extents, &Device::Cpu).unwrap());
    }
    memory
}

/// The mean loss, computed in one piece: all tokens at once, and all logits.
fn loss(shape: &Shape, positions: &Positions, memory: &Memory, tokens: &Micro) -> Computed<f64> {
    let of = |(name, _): Parameter| memory.parameters[&name].clone();
    let list = |numbers: &[u32]| Tensor::from_slice(numbers, numbers.len(), &Device::Cpu);
    let mut x = of(shape.embedding()).index_select(&list(&tokens.inputs)?, 0)?;
    for layer in 0..shape.layers {
        let weights: Vec<Tensor> = shape.layer(layer).into_iter().map(of).collect();
        x = operations::layer(shape, positions, &x, &weights)?;
    }
    let y = operations::norm(&x, &of(shape.output_norm()), shape.epsilon)?;
    let logits = operations::logits(&y, &of(shape.output()))?;
    let of_targets = logits.gather(&list(&tokens.targets)?.unsqueeze(1)?, D::Minus1)?.squeeze(1)?;
    (logits.exp()?.sum(D::Minus1)?.log()? - of_targets)?.mean_all()?.to_scalar()
}

/// The largest difference between a parameter's gradient and the differences of the loss, over all its elements, of
/// the gradient's norm.
fn worst(shape: &Shape, windows: usize, window: usize, micros: usize) -> (String, f64) {
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let mut memory = of(shape, &mut random);
    let mut token = || random.next_u32() % shape.vocabulary as u32;
    let tokens: Vec<Micro> = (0..micros)
        .map(|_| Micro {
            inputs: (0..windows * window).map(|_| token()).collect(),
            targets: (0..windows * window).map(|_| token()).collect(),
        })
        .collect();
    // Blocks of four tokens of the vocabulary.
    let pass =
        Pass::new(shape, window, DType::F64).unwrap().with_logits((4 * (windows * window).max(shape.width)) as u64);
    let of_pass = pass.run(&mut memory, &tokens).unwrap();
    let all = Micro {
        inputs: tokens.iter().flat_map(|micro| micro.inputs.clone()).collect(),
        targets: tokens.iter().flat_map(|micro| micro.targets.clone()).collect(),
    };
    let positions = Positions::new(shape, window, DType::F64).unwrap();
    let in_one_piece = loss(shape, &positions, &memory, &all).unwrap();
    assert!((of_pass - in_one_piece).abs() < 1e-12, "{of_pass}, {in_one_piece}");
    let mut worst = (String::new(), 0.0);
    for (name, extents) in shape.all() {
        let gradient = memory.gradients[&name].clone();
        let before = memory.parameters[&name].clone();
        let values: Vec<f64> = before.flatten_all().unwrap().to_vec1().unwrap();
        let mut changed = |at: usize, change: f64| {
            let mut values = values.clone();
            values[at] += change;
            memory.parameters.insert(name.clone(), Tensor::from_vec(values, extents.as_slice(), &Device::Cpu).unwrap());
            loss(shape, &positions, &memory, &all).unwrap()
        };
        // What the square of the step and the rounding of the loss leave is about 1e-10.
        let step = 1e-5;
        let mut difference = |at: usize| (changed(at, step) - changed(at, -step)) / (2.0 * step);
        let norm = gradient.iter().map(|value| value * value).sum::<f64>().sqrt();
        assert!(norm > 0.0, "{name}");
        let squares: f64 = gradient.iter().enumerate().map(|(at, value)| (difference(at) - value).powi(2)).sum();
        memory.parameters.insert(name.clone(), before);
        if squares.sqrt() / norm > worst.1 {
            worst = (name, squares.sqrt() / norm);
        }
    }
    worst
}

fn shape(heads: usize, kv_heads: usize, tied: bool) -> Shape {
    let (vocabulary, width, hidden) = (11, 8, 6);
    Shape { vocabulary, layers: 2, width, heads, kv_heads, hidden, rope_base: 100.0, epsilon: 1e-5, tied }
}

fn assert_gradients(shape: &Shape) {
    let (name, off) = worst(shape, 2, 5, 2);
    eprintln!("{name:?} is off by {off:e} of its norm, the most of all");
    assert!(off < 1e-6, "{shape:?}: {name:?} is off by {off:e} of its norm");
}

#[test]
fn the_gradients_of_all_parameters_are_those_of_the_loss() {
    assert_gradients(&shape(2, 2, false));
}

#[test]
fn so_are_those_of_heads_that_share_keys_and_of_an_embedding_that_is_the_output_too() {
    assert_gradients(&shape(4, 2, true));
}

/// Micro-batches of other sizes, and what the order of their sums leaves.
#[test]
fn a_batch_may_be_divided() {
    let shape = shape(4, 2, false);
    let run = |micros: usize| {
        let mut random = ChaCha8Rng::seed_from_u64(3);
        let mut memory = of(&shape, &mut random);
        let tokens: Vec<u32> = (0..4 * 5 + 1).map(|_| random.next_u32() % 11).collect();
        let count = 20 / micros;
        let micros: Vec<Micro> = (0..micros)
            .map(|at| Micro {
                inputs: tokens[at * count..][..count].to_vec(),
                targets: tokens[at * count + 1..][..count].to_vec(),
            })
            .collect();
        let loss = Pass::new(&shape, 5, DType::F64).unwrap().run(&mut memory, &micros).unwrap();
        (loss, memory.gradients)
    };
    let (whole, gradients) = run(1);
    for micros in [2, 4] {
        let (loss, divided) = run(micros);
        assert!((loss - whole).abs() < 1e-12);
        for (name, values) in &gradients {
            let off = values.iter().zip(&divided[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(off < 1e-12, "{name} is off by {off:e}");
        }
    }
}
