//! What a pass computes with, paged: parameters and gradients are the optimizer's, and vectors between layers lie in a
//! tensor beside them.

use std::ops::Range;

use candle_core::{DType as Element, Device, Tensor as Computed, Var};
use half::bf16;
use outcore::policy::SegmentClass;
use outcore::{DType, Result, Runtime, Tensor};
use outcore_train::{Optimizer, Planned, Step};
use serde_json::Value;

use crate::pass::{Place, Store, computed, levels};
use crate::shape::{Parameter, Shape};

/// The store of a training.
#[derive(Debug)]
pub struct Paged {
    runtime: Runtime,
    /// The parameters, what is kept of them, and their gradients.
    pub optimizer: Optimizer,
    /// The vectors: those of a place lie behind one another.
    vectors: Tensor,
    width: usize,
    micros: usize,
    /// Whether passes read the working copy of the parameters.
    mixed: bool,
    /// Elements that are copied under one pin.
    piece: u64,
    /// What the step that has begun is committed with, until it is durable: see [`Optimizer::commit`].
    commit: Option<Value>,
}

impl Paged {
    /// A store for passes over `micros` micro-batches of `tokens` tokens each.
    ///
    /// # Errors
    /// Those of allocations.
    pub fn new(runtime: &Runtime, optimizer: Optimizer, shape: &Shape, micros: usize, tokens: usize) -> Result<Self> {
        let places = (levels(shape) * micros) as u64;
        let vectors =
            runtime.alloc_for(SegmentClass::Activations, DType::F32, &[places, (tokens * shape.width) as u64])?;
        let piece = PAGES_AT_ONCE * runtime.stats().page_size.bytes() / 4;
        let runtime = runtime.clone();
        let mixed = optimizer.working_copy(&shape.embedding().0).is_ok();
        let mut paged = Self { runtime, optimizer, vectors, width: shape.width, micros, mixed, piece, commit: None };
        paged.declare(shape)?;
        Ok(paged)
    }

    /// A parameter as passes read it.
    fn weights(&self, name: &str) -> Result<Tensor> {
        if self.mixed { self.optimizer.working_copy(name) } else { self.optimizer.parameter(name) }
    }

    /// Declares the order of a pass: up through the layers, each of which the step before updates first, and down.
    fn declare(&mut self, shape: &Shape) -> Result<()> {
        let updates = |of: &[Parameter]| of.iter().map(|(name, _)| Planned::Update(name.clone())).collect::<Vec<_>>();
        let parameters = |of: Vec<Parameter>| -> Result<Vec<Planned>> {
            of.iter().map(|(name, _)| self.weights(name).map(Planned::Use)).collect()
        };
        let gradients = |of: Vec<Parameter>| -> Result<Vec<Planned>> {
            of.iter().map(|(name, _)| self.optimizer.gradients_of(name).map(Planned::Use)).collect()
        };
        // For one micro-batch after the other, the places in these layers.
        let vectors = |layers: &[usize]| -> Result<Vec<Planned>> {
            let places =
                (0..self.micros).flat_map(|micro| layers.iter().map(move |layer| Place { layer: *layer, micro }));
            places.map(|place| self.place(place).map(Planned::Use)).collect()
        };
        let behind = shape.layers;
        let mut order = vectors(&[0])?;
        for layer in 0..shape.layers {
            order.extend(updates(&shape.layer(layer)));
            order.extend(parameters(shape.layer(layer))?);
            order.extend(vectors(&[layer, layer + 1])?);
        }
        order.extend(updates(&[shape.output_norm()]));
        order.extend(vectors(&[behind, behind + 1])?);
        // The output matrix goes in blocks, for the loss and for the gradients.
        order.extend(updates(&[shape.output()]));
        order.extend(parameters(vec![shape.output()])?);
        order.extend(vectors(&[behind + 1])?);
        // Of the embedding a pass has used few rows.
        order.extend(updates(&[shape.embedding()]));
        order.extend(parameters(vec![shape.output()])?);
        order.extend(vectors(&[behind + 1, behind + 2])?);
        order.extend(gradients(vec![shape.output()])?);
        order.extend(vectors(&[behind, behind + 2])?);
        for layer in (0..shape.layers).rev() {
            order.extend(parameters(shape.layer(layer))?);
            for micro in 0..self.micros {
                order.push(Planned::Use(self.place(Place { layer, micro })?));
                order.push(Planned::Use(self.place(Place { layer: layer + 1, micro })?));
                order.extend(gradients(shape.layer(layer))?);
            }
        }
        order.extend(vectors(&[0])?);
        self.optimizer.plan_pass_with_updates(&order)
    }

    /// Begins the optimizer's step, whose updates the next pass makes where it comes to a parameter.
    ///
    /// A step that is skipped does not begin: the next pass finds nothing to update. It has declared updates that it
    /// does not make, as the first pass of a process has, so what was read ahead for them is not used.
    ///
    /// # Errors
    /// Those of [`Optimizer::begin_step`].
    pub fn begin_step(&mut self) -> Result<Step> {
        self.optimizer.begin_step(1.0)
    }

    /// Has the step that has begun committed with `program` when all its updates are made. After one that was skipped,
    /// what the folder has then is committed at the same place of the next pass.
    pub fn commit_with_step(&mut self, program: Value) {
        self.commit = Some(program);
    }

    /// Ends the step that has begun, if there is one, and commits it if that is to be. Where the commit fails, the next
    /// call makes it.
    ///
    /// # Errors
    /// Those of [`Optimizer::end_step`] and [`Optimizer::commit`].
    pub fn end_step(&mut self) -> Result<()> {
        self.optimizer.end_step()?;
        if let Some(program) = &self.commit {
            self.optimizer.commit(program)?;
            self.commit = None;
        }
        Ok(())
    }

    /// Updates these rows of a parameter, if a step has begun.
    fn update(&self, (name, shape): &Parameter, rows: Range<usize>) -> Result<()> {
        let columns: usize = shape[1..].iter().product();
        self.optimizer.update(name, (rows.start * columns) as u64..(rows.end * columns) as u64)
    }

    /// The vectors of all places.
    pub fn vectors(&self) -> &Tensor {
        &self.vectors
    }

    fn place(&self, Place { layer, micro }: Place) -> Result<Tensor> {
        let at = (layer * self.micros + micro) as u64;
        self.vectors.rows(at..at + 1)
    }

    /// The elements of a tensor, copied piece by piece: no piece needs more memory than a pin of a few pages.
    fn copied(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        let elements = tensor.shape().iter().product::<u64>();
        let flat = tensor.reshape(&[elements])?;
        let mut values = Vec::with_capacity(elements as usize);
        for first in (0..elements).step_by(self.piece as usize) {
            let piece = flat.rows(first..(first + self.piece).min(elements))?;
            self.append(&piece, &mut values)?;
        }
        Ok(values)
    }

    /// Appends the elements of a tensor of a few pages.
    fn append(&self, tensor: &Tensor, values: &mut Vec<f32>) -> Result<()> {
        let pin = self.runtime.pin(tensor).of(self.optimizer.walker()).wait()?;
        match tensor.dtype() {
            DType::BF16 => values.extend(pin.view::<bf16>()?.iter().map(|value| value.to_f32())),
            _ => values.extend_from_slice(pin.view::<f32>()?),
        }
        Ok(())
    }

    /// Writes the elements of a tensor in order, piece by piece.
    ///
    /// # Errors
    /// Those of pins.
    pub fn write(&self, tensor: &Tensor, values: impl IntoIterator<Item = f32>) -> Result<()> {
        let elements = tensor.shape().iter().product::<u64>();
        let flat = tensor.reshape(&[elements])?;
        let mut values = values.into_iter();
        for first in (0..elements).step_by(self.piece as usize) {
            let piece = flat.rows(first..(first + self.piece).min(elements))?;
            let mut pin = self.runtime.pin(&piece).write().of(self.optimizer.walker()).wait()?;
            pin.view_mut::<f32>()?.iter_mut().zip(&mut values).for_each(|(to, value)| *to = value);
        }
        Ok(())
    }
}

/// Pages whose elements are copied under one pin.
const PAGES_AT_ONCE: u64 = 4;

fn values(tensor: &Computed) -> Result<Vec<f32>> {
    computed("what is kept", tensor.flatten_all().and_then(|flat| flat.to_vec1()))
}

impl Store for Paged {
    fn parameter(&mut self, parameter: &Parameter) -> Result<Var> {
        let (name, shape) = parameter;
        self.update(parameter, 0..shape[0])?;
        let values = self.copied(&self.weights(name)?)?;
        computed("a parameter", Var::from_vec(values, shape.as_slice(), &Device::Cpu))
    }

    fn block(&mut self, parameter: &Parameter, rows: Range<usize>) -> Result<Var> {
        let (name, shape) = parameter;
        self.update(parameter, rows.clone())?;
        let block = self.weights(name)?.rows(rows.start as u64..rows.end as u64)?;
        let values = self.copied(&block)?;
        computed("a block of the head", Var::from_vec(values, (rows.len(), shape[1]), &Device::Cpu))
    }

    fn rows(&mut self, parameter: &Parameter, numbers: &[u32]) -> Result<Computed> {
        let (name, _) = parameter;
        let matrix = self.weights(name)?;
        let mut values = Vec::with_capacity(numbers.len() * self.width);
        for number in numbers {
            self.update(parameter, *number as usize..*number as usize + 1)?;
            self.append(&matrix.rows(u64::from(*number)..u64::from(*number) + 1)?, &mut values)?;
        }
        computed("the embedding", Computed::from_vec(values, (numbers.len(), self.width), &Device::Cpu))
    }

    fn put(&mut self, place: Place, vectors: &Computed) -> Result<()> {
        self.write(&self.place(place)?, values(vectors)?)
    }

    fn get(&mut self, place: Place) -> Result<Var> {
        let values = self.copied(&self.place(place)?)?;
        let tokens = values.len() / self.width;
        computed("what is kept", Var::from_vec(values, (tokens, self.width), &Device::Cpu))
    }

    fn add(&mut self, (name, shape): &Parameter, row: usize, gradient: &Computed) -> Result<()> {
        debug_assert_eq!(gradient.dtype(), Element::F32);
        self.end_step()?;
        let columns: usize = shape[1..].iter().product();
        self.optimizer.accumulate(name, (row * columns) as u64, &values(gradient)?, 1.0)
    }
}
