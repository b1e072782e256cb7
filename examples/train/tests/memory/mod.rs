//! A store for passes that keeps all in memory.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::{Device, Tensor, Var};
use outcore::Result;
use train::pass::{Place, Store};
use train::shape::Parameter;

/// Everything in memory, in `f64`.
#[derive(Default)]
pub struct Memory {
    pub parameters: HashMap<String, Tensor>,
    pub gradients: HashMap<String, Vec<f64>>,
    places: HashMap<Place, Tensor>,
}

impl Store for Memory {
    fn parameter(&mut self, (name, _): &Parameter) -> Result<Var> {
        Ok(Var::from_tensor(&self.parameters[name]).unwrap())
    }
    fn block(&mut self, (name, _): &Parameter, rows: Range<usize>) -> Result<Var> {
        Ok(Var::from_tensor(&self.parameters[name].narrow(0, rows.start, rows.len()).unwrap()).unwrap())
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
