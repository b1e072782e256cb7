//! The gradient of every parameter, against differences of the loss in `f64`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod memory;

use candle_core::{DType, Device, Tensor};
use memory::Memory;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use train::pass::{Micro, Pass};
use train::shape::Shape;

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

/// The largest difference between a parameter's gradient and the differences of the loss, of the gradient's norm.
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
    pass.run(&mut memory, &tokens).unwrap();
    let gradients = std::mem::take(&mut memory.gradients);
    let mut worst = (String::new(), 0.0);
    for (name, extents) in shape.all() {
        let gradient = &gradients[&name];
        let values: Vec<f64> = memory.parameters[&name].flatten_all().unwrap().to_vec1().unwrap();
        let mut loss = |at: usize, change: f64| {
            let mut values = values.clone();
            values[at] += change;
            memory.parameters.insert(name.clone(), Tensor::from_vec(values, extents.as_slice(), &Device::Cpu).unwrap());
            pass.run(&mut memory, &tokens).unwrap()
        };
        // What the square of the step and the rounding of the loss leave is about 1e-10.
        let step = 1e-5;
        let mut difference = |at: usize| (loss(at, step) - loss(at, -step)) / (2.0 * step);
        let norm = gradient.iter().map(|value| value * value).sum::<f64>().sqrt();
        assert!(norm > 0.0, "{name}");
        // Some elements of each, in rows and columns of all kinds: a stride is odd.
        let checked = (0..values.len()).step_by((values.len() / 12) | 1);
        let squares: f64 = checked.map(|at| (difference(at) - gradient[at]).powi(2)).sum();
        memory.parameters.insert(name.clone(), Tensor::from_vec(values, extents, &Device::Cpu).unwrap());
        if squares.sqrt() / norm > worst.1 {
            worst = (name, squares.sqrt() / norm);
        }
    }
    worst
}

fn shape(heads: usize, kv_heads: usize, tied: bool) -> Shape {
    let (vocabulary, width, hidden) = (11, 12, 10);
    Shape { vocabulary, layers: 2, width, heads, kv_heads, hidden, rope_base: 100.0, epsilon: 1e-5, tied }
}

#[test]
fn the_gradients_of_all_parameters_are_those_of_the_loss() {
    for (heads, kv_heads, tied) in [(3, 3, false), (6, 2, true)] {
        let (name, off) = worst(&shape(heads, kv_heads, tied), 2, 5, 2);
        assert!(off < 1e-6, "{heads} heads, {kv_heads} of keys: {name:?} is off by {off:e} of its norm");
    }
}

/// Micro-batches of other sizes, and what the order of their sums leaves.
#[test]
fn a_batch_may_be_divided() {
    let shape = shape(6, 2, false);
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
