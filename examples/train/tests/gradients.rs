//! The gradient of every parameter, against differences of the loss in `f64`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor, Var};
use outcore::Result;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use train::pass::{Micro, Pass, Place, Store};
use train::shape::{Parameter, Shape};

/// Everything in memory, in `f64`.
#[derive(Default)]
struct Memory {
    parameters: HashMap<String, Tensor>,
    gradients: HashMap<String, Vec<f64>>,
    places: HashMap<Place, Tensor>,
}

impl Store for Memory {
    fn parameter(&mut self, (name, _): &Parameter) -> Result<Var> {
        Ok(Var::from_tensor(&self.parameters[name]).unwrap())
    }
    fn rows(&mut self, (name, _): &Parameter, numbers: &[u32]) -> Result<Tensor> {
        let numbers = Tensor::from_slice(numbers, numbers.len(), &Device::Cpu).unwrap();
        Ok(self.parameters[name].index_select(&numbers, 0).unwrap())
    }
    fn put(&mut self, place: Place, vectors: &Tensor) -> Result<()> {
        self.places.insert(place, vectors.detach());
        Ok(())
    }
    fn get(&mut self, place: Place) -> Result<Var> {
        Ok(Var::from_tensor(&self.places[&place]).unwrap())
    }
    fn add(&mut self, (name, shape): &Parameter, row: usize, gradient: &Tensor) -> Result<()> {
        let columns: usize = shape[1..].iter().product();
        let gradient: Vec<f64> = gradient.flatten_all().unwrap().to_vec1().unwrap();
        let sums = self.gradients.entry(name.clone()).or_insert_with(|| vec![0.0; shape.iter().product()]);
        sums[row * columns..].iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient);
        Ok(())
    }
}

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
    let pass = Pass::new(shape, window, DType::F64).unwrap();
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
        // Of the fifth order in the step (Fornberg 1988, table 1), so that rounding is what is left.
        let step = 1e-3;
        let difference = |loss: &mut dyn FnMut(usize, f64) -> f64, at: usize| {
            let mut around = |steps: f64| loss(at, steps * step) - loss(at, -steps * step);
            (around(1.0) * 8.0 - around(2.0)) / (12.0 * step)
        };
        let norm = gradient.iter().map(|value| value * value).sum::<f64>().sqrt();
        assert!(norm > 0.0, "{name}");
        // Every seventh element, and so rows and columns of all kinds.
        let checked = (0..values.len()).step_by(7);
        let squares: f64 = checked.map(|at| (difference(&mut loss, at) - gradient[at]).powi(2)).sum();
        memory.parameters.insert(name.clone(), Tensor::from_vec(values, extents, &Device::Cpu).unwrap());
        if squares.sqrt() / norm > worst.1 {
            worst = (name, squares.sqrt() / norm);
        }
    }
    worst
}

fn shape(heads: usize, kv_heads: usize) -> Shape {
    let (vocabulary, width, hidden) = (11, 12, 10);
    Shape { vocabulary, layers: 2, width, heads, kv_heads, hidden, rope_base: 100.0, epsilon: 1e-5 }
}

#[test]
fn the_gradients_of_all_parameters_are_those_of_the_loss() {
    for (heads, kv_heads) in [(3, 3), (6, 2), (2, 1)] {
        let (name, off) = worst(&shape(heads, kv_heads), 2, 5, 2);
        assert!(off < 1e-6, "{heads} heads, {kv_heads} of keys: {name:?} is off by {off:e} of its norm");
    }
}

/// Micro-batches of other sizes, and what the order of their sums leaves.
#[test]
fn a_batch_may_be_divided() {
    let shape = shape(6, 2);
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
