//! One pass over the model, forward and back, a layer at a time.
//!
//! All micro-batches go through a layer before the next one, so its parameters come up once forward and once back, and
//! its gradients once. Between the layers stand the vectors of the tokens: those that went into each layer on the way
//! up, and their gradients on the way down, in the same place. What a layer computes inside is computed again on the
//! way down.

use std::ops::Range;

use candle_core::backprop::GradStore;
use candle_core::{DType, Result as Computed, Tensor, Var};
use outcore::{Error, ErrorKind, Result};
use outcore_lab::planning::LayerAtATime;

use crate::memory::work;
use crate::operations::{self, Exponents, Positions};
use crate::shape::{Parameter, Shape};

/// Some windows that are computed at once: tokens, and the token behind each. Windows lie one behind the other.
#[derive(Clone, Debug)]
pub struct Micro {
    /// The tokens.
    pub inputs: Vec<u32>,
    /// The tokens behind these.
    pub targets: Vec<u32>,
}

impl Micro {
    /// Of the targets in a block of the vocabulary: the token's number here, and the target's number in the block.
    fn targets_in(&self, block: &Range<usize>) -> Vec<(u32, u32)> {
        let targets = self.targets.iter().enumerate().filter(|(_, target)| block.contains(&(**target as usize)));
        targets.map(|(token, target)| (token as u32, target - block.start as u32)).collect()
    }
}

/// Where the vectors of one micro-batch are kept that go into a layer; behind the last one, into the norm before the
/// head; behind that, into the head; and last, the gradients of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The layer, from 0.
    pub layer: usize,
    /// The micro-batch, from 0.
    pub micro: usize,
}

/// How many `layer`s the [places](Place) of a micro-batch have.
pub fn levels(shape: &Shape) -> usize {
    shape.layers + 3
}

/// What a pass computes with. Its errors end the pass.
pub trait Store {
    /// A parameter, as a variable: a part of what is differentiated.
    ///
    /// # Errors
    /// Its own.
    fn parameter(&mut self, parameter: &Parameter) -> Result<Var>;
    /// Rows of a matrix that lie behind one another, as a variable.
    ///
    /// # Errors
    /// Its own.
    fn block(&mut self, parameter: &Parameter, rows: Range<usize>) -> Result<Var>;
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
    logits: u64,
}

impl Pass {
    /// Passes of a model over windows of this many tokens.
    ///
    /// # Errors
    /// Those of candle.
    pub fn new(shape: &Shape, window: usize, dtype: DType) -> Result<Self> {
        let positions = computed("the positions", Positions::new(shape, window, dtype))?;
        Ok(Self { shape: shape.clone(), positions, logits: LayerAtATime::LOGITS })
    }

    /// Computes no more logits at once than this, of no more elements of the output matrix, and those of one token of
    /// the vocabulary at least.
    #[must_use]
    pub fn with_logits(self, logits: u64) -> Self {
        Self { logits, ..self }
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
                store.put(Place { layer, micro }, &of(&gradients, &x, "the vectors before a layer")?)?;
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

    /// The mean loss. Leaves the gradients of the vectors behind the last layer in their places.
    ///
    /// The vocabulary goes in blocks of rows, twice: for the sums of the exponents, and for the gradients. With the
    /// sums known, the loss of a token is the sum of `exp(logit - logarithm of the sum)` over all blocks, less the
    /// logit of the target, as far as the gradients go: by each logit they are the probability, less 1 for the target.
    fn head(&self, store: &mut impl Store, micros: &[Micro], tokens: usize) -> Result<f64> {
        let (norm, output) = (self.shape.output_norm(), self.shape.output());
        let weight = store.parameter(&norm)?;
        let place = |micro| Place { layer: self.shape.layers, micro };
        let behind = |micro| Place { layer: self.shape.layers + 1, micro };
        let normed = |x: &Tensor, weight: &Tensor| operations::norm(x, weight, self.shape.epsilon);
        for micro in 0..micros.len() {
            let x = store.get(place(micro))?.as_detached_tensor();
            let y = computed("a norm", normed(&x, &weight.as_detached_tensor()))?;
            store.put(behind(micro), &y)?;
        }
        let blocks = self.blocks(micros);
        let mut exponents: Vec<Option<Exponents>> = vec![None; micros.len()];
        let mut of_targets = 0.0;
        for block in blocks.clone() {
            let rows = store.block(&output, block.clone())?.as_detached_tensor();
            for (number, micro) in micros.iter().enumerate() {
                let y = store.get(behind(number))?.as_detached_tensor();
                let seen = || {
                    let logits = operations::logits(&y, &rows)?;
                    let here = Exponents::new(&logits)?;
                    let so_far = exponents[number].as_ref().map_or_else(|| Ok(here.clone()), |all| all.and(&here))?;
                    let of_targets = operations::sum_at(&logits, &micro.targets_in(&block))?;
                    Ok((so_far, of_targets.map_or(Ok(0.0), |sum| scalar(&sum))?))
                };
                let (so_far, sum) = computed("the loss", seen())?;
                (exponents[number], of_targets) = (Some(so_far), of_targets + sum);
            }
        }
        let logarithms = exponents.iter().flatten().map(Exponents::logarithm).collect::<Computed<Vec<Tensor>>>();
        let logarithms = computed("the loss", logarithms)?;
        let mut loss = -of_targets;
        for logarithms in &logarithms {
            loss += computed("the loss", logarithms.sum_all().and_then(|sum| scalar(&sum)))?;
        }
        // The gradients of what the head is given, added up over the blocks.
        let sum_of = |micro| Place { layer: self.shape.layers + 2, micro };
        let mut is_first = true;
        // From the last block on, which is still there.
        for block in blocks.rev() {
            let rows = store.block(&output, block.clone())?;
            for (number, micro) in micros.iter().enumerate() {
                let y = store.get(behind(number))?;
                let back = || {
                    let logits = operations::logits(&y, &rows)?;
                    let all = logits.broadcast_sub(&logarithms[number])?.exp()?.sum_all()?;
                    let loss = match operations::sum_at(&logits, &micro.targets_in(&block))? {
                        Some(of_targets) => (all - of_targets)?,
                        None => all,
                    };
                    (loss / tokens as f64)?.backward()
                };
                let gradients = computed("the gradients of the loss", back())?;
                store.add(&output, block.start, &of(&gradients, &rows, &format!("the parameter {:?}", output.0))?)?;
                let gradient = of(&gradients, &y, "the vectors behind the last layer")?;
                let sum =
                    if is_first { Ok(gradient) } else { store.get(sum_of(number))?.as_detached_tensor() + gradient };
                store.put(sum_of(number), &computed("the gradients of the loss", sum)?)?;
            }
            is_first = false;
        }
        for micro in 0..micros.len() {
            let (x, sum) = (store.get(place(micro))?, store.get(sum_of(micro))?.as_detached_tensor());
            let back = || (normed(&x, &weight)? * sum)?.sum_all()?.backward();
            let gradients = computed("a norm's gradients", back())?;
            store.add(&norm, 0, &of(&gradients, &weight, &format!("the parameter {:?}", norm.0))?)?;
            store.put(place(micro), &of(&gradients, &x, "the vectors behind the last layer")?)?;
        }
        Ok(loss / tokens as f64)
    }

    /// Blocks of the vocabulary, of which each has few enough logits.
    fn blocks(&self, micros: &[Micro]) -> impl DoubleEndedIterator<Item = Range<usize>> + Clone + use<> {
        let tokens = micros.iter().map(|micro| micro.inputs.len()).max().unwrap_or(1);
        let (rows, all) = (work(&self.shape, tokens, 1).rows(self.logits) as usize, self.shape.vocabulary);
        (0..all.div_ceil(rows)).map(move |block| block * rows..((block + 1) * rows).min(all))
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

fn scalar(x: &Tensor) -> Computed<f64> {
    x.to_dtype(DType::F64)?.to_scalar()
}

fn variables(store: &mut impl Store, parameters: &[Parameter]) -> Result<Vec<Var>> {
    parameters.iter().map(|parameter| store.parameter(parameter)).collect()
}

/// What was found for a variable. Operations without a backward end the search for it in silence.
fn of(gradients: &GradStore, variable: &Var, what: &str) -> Result<Tensor> {
    // candle's gradients hold all that they were computed of, as if they were to be differentiated again.
    gradients.get(variable).map(Tensor::detach).ok_or_else(|| {
        Error::new(ErrorKind::Internal, format!("{what} got no gradient")).remedy("report this as a bug")
    })
}

fn add_all(store: &mut impl Store, parameters: &[Parameter], weights: &[Var], gradients: &GradStore) -> Result<()> {
    for (parameter, weight) in parameters.iter().zip(weights) {
        store.add(parameter, 0, &of(gradients, weight, &format!("the parameter {:?}", parameter.0))?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use candle_core::Device;

    use super::*;

    /// Keeps the gradients that are added.
    struct Added(Vec<Tensor>);

    impl Store for Added {
        fn parameter(&mut self, _: &Parameter) -> Result<Var> {
            unreachable!("gradients are only added")
        }
        fn block(&mut self, _: &Parameter, _: Range<usize>) -> Result<Var> {
            unreachable!("gradients are only added")
        }
        fn rows(&mut self, _: &Parameter, _: &[u32]) -> Result<Tensor> {
            unreachable!("gradients are only added")
        }
        fn put(&mut self, _: Place, _: &Tensor) -> Result<()> {
            unreachable!("gradients are only added")
        }
        fn get(&mut self, _: Place) -> Result<Var> {
            unreachable!("gradients are only added")
        }
        fn add(&mut self, _: &Parameter, _: usize, gradient: &Tensor) -> Result<()> {
            self.0.push(gradient.clone());
            Ok(())
        }
    }

    /// As behind an operation without a backward, which gives no gradient and no error.
    #[test]
    fn a_parameter_that_gets_no_gradient_is_an_error_with_its_name() {
        let variable = || Var::from_vec(vec![1f32, 2.0], 2, &Device::Cpu).unwrap();
        let (used, cut) = (variable(), variable());
        let product = (used.as_tensor() * cut.as_detached_tensor()).unwrap();
        let gradients = product.sum_all().unwrap().backward().unwrap();
        let parameters = [("used".to_owned(), vec![2]), ("cut off".to_owned(), vec![2])];
        let mut store = Added(Vec::new());
        let error = add_all(&mut store, &parameters, &[used.clone(), cut], &gradients).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal);
        assert!(error.to_string().contains("the parameter \"cut off\" got no gradient"), "{error}");
        let added: Vec<Vec<f32>> = store.0.iter().map(|gradient| gradient.to_vec1().unwrap()).collect();
        assert_eq!(added, [[1.0, 2.0]]);
        let error = of(&gradients, &variable(), "the vectors before a layer").unwrap_err();
        assert!(error.to_string().contains("the vectors before a layer got no gradient"), "{error}");
    }
}
