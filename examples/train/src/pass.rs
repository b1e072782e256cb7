//! One pass over the model, forward and back, a layer at a time.
//!
//! All micro-batches go through a layer before the next one, so its parameters come up once forward and once back, and
//! its gradients once. Between the layers stand the vectors of the tokens: those that went into each layer on the way
//! up, and their gradients on the way down, in the same place. What a layer computes inside is computed again on the
//! way down.

use candle_core::backprop::GradStore;
use candle_core::{DType, Result as Computed, Tensor, Var};
use outcore::{Error, ErrorKind, Result};

use crate::operations::{self, Positions};
use crate::shape::{Parameter, Shape};

/// Logits that are computed at once, at most.
const LOGITS_AT_ONCE: usize = 1 << 20;

/// Some windows that are computed at once: tokens, and the token behind each. Windows lie one behind the other.
#[derive(Clone, Debug)]
pub struct Micro {
    /// The tokens.
    pub inputs: Vec<u32>,
    /// The tokens behind these.
    pub targets: Vec<u32>,
}

/// Where the vectors of one micro-batch are kept that go into a layer; behind the last one, into the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The layer, from 0.
    pub layer: usize,
    /// The micro-batch, from 0.
    pub micro: usize,
}

/// What a pass computes with. Its errors end the pass.
pub trait Store {
    /// A parameter, as a variable: a part of what is differentiated.
    ///
    /// # Errors
    /// Its own.
    fn parameter(&mut self, parameter: &Parameter) -> Result<Var>;
    /// Rows of a matrix, one for each number: `[numbers, columns]`.
    ///
    /// # Errors
    /// Its own.
    fn rows(&mut self, parameter: &Parameter, numbers: &[u32]) -> Result<Tensor>;
    /// Keeps vectors, in place of those that were there.
    ///
    /// # Errors
    /// Its own.
    fn put(&mut self, place: Place, vectors: &Tensor) -> Result<()>;
    /// The vectors that were put there last, as a variable.
    ///
    /// # Errors
    /// Its own.
    fn get(&mut self, place: Place) -> Result<Var>;
    /// Adds to the gradient of a parameter, from its row `row` on.
    ///
    /// # Errors
    /// Its own.
    fn add(&mut self, parameter: &Parameter, row: usize, gradient: &Tensor) -> Result<()>;
}

/// An error of candle's: nothing that a user does causes one.
pub fn computed<T>(what: &str, outcome: Computed<T>) -> Result<T> {
    outcome.map_err(|cause| {
        Error::new(ErrorKind::Internal, format!("computing {what} failed: {cause}")).remedy("report this as a bug")
    })
}

/// Passes over windows of one length.
#[derive(Debug)]
pub struct Pass {
    shape: Shape,
    positions: Positions,
}

impl Pass {
    /// Passes of a model over windows of this many tokens.
    ///
    /// # Errors
    /// Those of candle.
    pub fn new(shape: &Shape, window: usize, dtype: DType) -> Result<Self> {
        let positions = computed("the positions", Positions::new(shape, window, dtype))?;
        Ok(Self { shape: shape.clone(), positions })
    }

    /// The mean loss of the micro-batches' tokens. Adds its gradient by each parameter to the store's.
    ///
    /// # Errors
    /// Those of the store and of candle; that a parameter has no gradient.
    pub fn run(&self, store: &mut impl Store, micros: &[Micro]) -> Result<f64> {
        let shape = &self.shape;
        let tokens: usize = micros.iter().map(|micro| micro.inputs.len()).sum();
        let embedding = shape.embedding();
        for (number, micro) in micros.iter().enumerate() {
            let vectors = store.rows(&embedding, &micro.inputs)?;
            store.put(Place { layer: 0, micro: number }, &vectors)?;
        }
        for layer in 0..shape.layers {
            let weights = variables(store, &shape.layer(layer))?;
            let weights: Vec<Tensor> = weights.iter().map(Var::as_detached_tensor).collect();
            for micro in 0..micros.len() {
                let x = store.get(Place { layer, micro })?.as_detached_tensor();
                let y = computed("a layer", operations::layer(shape, &self.positions, &x, &weights))?;
                store.put(Place { layer: layer + 1, micro }, &y)?;
            }
        }
        let loss = self.head(store, micros, tokens)?;
        for layer in (0..shape.layers).rev() {
            let parameters = shape.layer(layer);
            let weights = variables(store, &parameters)?;
            for micro in 0..micros.len() {
                let x = store.get(Place { layer, micro })?;
                let behind = store.get(Place { layer: layer + 1, micro })?.as_detached_tensor();
                let gradients = computed("a layer's gradients", self.back(&x, &weights, &behind))?;
                add_all(store, &parameters, &weights, &gradients)?;
                store.put(Place { layer, micro }, of(&gradients, &x, "the vectors before a layer")?)?;
            }
        }
        for (number, micro) in micros.iter().enumerate() {
            let gradient = store.get(Place { layer: 0, micro: number })?.as_detached_tensor();
            self.embedding_back(store, &embedding, micro, &gradient)?;
        }
        Ok(loss)
    }

    /// The gradients of a layer, from those behind it.
    fn back(&self, x: &Var, weights: &[Var], behind: &Tensor) -> Computed<GradStore> {
        let weights: Vec<Tensor> = weights.iter().map(|weight| weight.as_tensor().clone()).collect();
        let y = operations::layer(&self.shape, &self.positions, x, &weights)?;
        // The gradient of this sum is that of the loss.
        (y * behind)?.sum_all()?.backward()
    }

    /// The mean loss. Leaves the gradients of the vectors in their places.
    fn head(&self, store: &mut impl Store, micros: &[Micro], tokens: usize) -> Result<f64> {
        let parameters = self.shape.head_parameters();
        let weights = variables(store, &parameters)?;
        let plain: Vec<Tensor> = weights.iter().map(|weight| weight.as_tensor().clone()).collect();
        let at_once = (LOGITS_AT_ONCE / self.shape.vocabulary).max(1);
        let mut sum = 0.0;
        for (number, micro) in micros.iter().enumerate() {
            let place = Place { layer: self.shape.layers, micro: number };
            let vectors = store.get(place)?.as_detached_tensor();
            let mut before = Vec::new();
            for (part, targets) in micro.targets.chunks(at_once).enumerate() {
                let part = || {
                    let x = Var::from_tensor(&vectors.narrow(0, part * at_once, targets.len())?)?;
                    let loss = operations::loss(&self.shape, &x, &plain, targets)?;
                    let value = loss.to_dtype(DType::F64)?.to_scalar::<f64>()?;
                    Ok((x, value, (loss / tokens as f64)?.backward()?))
                };
                let (x, value, gradients) = computed("the loss", part())?;
                sum += value;
                add_all(store, &parameters, &weights, &gradients)?;
                before.push(of(&gradients, &x, "the vectors behind the last layer")?.clone());
            }
            store.put(place, &computed("the loss", Tensor::cat(&before, 0))?)?;
        }
        Ok(sum / tokens as f64)
    }

    /// Adds the gradients of tokens to the rows of these.
    fn embedding_back(
        &self,
        store: &mut impl Store,
        embedding: &Parameter,
        micro: &Micro,
        gradient: &Tensor,
    ) -> Result<()> {
        let mut rows = micro.inputs.clone();
        rows.sort_unstable();
        rows.dedup();
        let at = |token: &u32| rows.partition_point(|row| row < token) as u32;
        let places: Vec<u32> = micro.inputs.iter().map(at).collect();
        let sums = || {
            let places = Tensor::from_vec(places, micro.inputs.len(), gradient.device())?;
            let zeros = Tensor::zeros((rows.len(), self.shape.width), gradient.dtype(), gradient.device())?;
            zeros.index_add(&places, gradient, 0)
        };
        let sums = computed("the embedding's gradients", sums())?;
        for (number, row) in rows.iter().enumerate() {
            let gradient = computed("the embedding's gradients", sums.narrow(0, number, 1))?;
            store.add(embedding, *row as usize, &gradient)?;
        }
        Ok(())
    }
}

fn variables(store: &mut impl Store, parameters: &[Parameter]) -> Result<Vec<Var>> {
    parameters.iter().map(|parameter| store.parameter(parameter)).collect()
}

/// What was found for a variable. Operations without a backward end the search for it in silence.
fn of<'a>(gradients: &'a GradStore, variable: &Var, what: &str) -> Result<&'a Tensor> {
    gradients.get(variable).ok_or_else(|| {
        Error::new(ErrorKind::Internal, format!("{what} got no gradient")).remedy("report this as a bug")
    })
}

fn add_all(store: &mut impl Store, parameters: &[Parameter], weights: &[Var], gradients: &GradStore) -> Result<()> {
    for (parameter, weight) in parameters.iter().zip(weights) {
        store.add(parameter, 0, of(gradients, weight, &format!("the parameter {:?}", parameter.0))?)?;
    }
    Ok(())
}
