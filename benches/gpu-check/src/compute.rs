//! What the GPU computes with a resident tensor: a matrix product by cuBLAS, or, where that is not found, a kernel of
//! our own that reads every byte.

use crate::Failure;
use crate::cuda::{Blas, DeviceMemory, EventKind, Gpu, HostMemory, Kernels, Product, Stream};
use crate::model::{Shape, noise};
use crate::report::Report;

type Result<T = ()> = std::result::Result<T, Failure>;

/// How much is computed with each tensor: products of a fixed height, or steps for each word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Amount(pub(crate) u64);

enum Kind {
    Products { blas: Blas, tokens: u32, x: DeviceMemory, y: DeviceMemory },
    Sums,
}

/// Computes with tensors of one shape, on one stream. When a call that waits returns, all submitted work has ended.
pub(crate) struct Compute {
    kind: Kind,
    kernels: Kernels,
    shape: Shape,
    /// Two words: see kernels.ptx.
    sums: DeviceMemory,
    read_back: HostMemory,
    pub(crate) stream: Stream,
    gpu: Gpu,
}

impl Compute {
    /// With cuBLAS, a product has `tokens` rows.
    pub(crate) fn new(gpu: &Gpu, shape: Shape, tokens: u32, report: &mut Report<'_>) -> Result<Self> {
        let stream = gpu.stream()?;
        let kind = match Blas::load(&stream) {
            Ok(blas) => {
                let x_bytes = u64::from(tokens) * u64::from(shape.cols) * 2;
                let x = DeviceMemory::new(gpu, x_bytes)?;
                let y = DeviceMemory::new(gpu, u64::from(tokens) * u64::from(shape.rows) * 2)?;
                let mut values = HostMemory::alloc(gpu, x_bytes)?;
                noise(u64::MAX, 0, values.bytes_mut()?);
                stream.copy_in(&values, 0, x.address, x_bytes)?;
                let Shape { rows, cols } = shape;
                report.chosen("compute", format!("cuBLAS, bf16, {tokens} x {cols} by {cols} x {rows}"));
                Kind::Products { blas, tokens, x, y }
            }
            Err(failure) => {
                report.chosen("compute", format!("a kernel of our own that reads every word; cuBLAS: {failure}"));
                report.note("without cuBLAS nothing is said of matrix products: what hides transfers is that kernel");
                Kind::Sums
            }
        };
        let sums = DeviceMemory::new(gpu, 16)?;
        stream.zero(sums.address, 16)?;
        let read_back = HostMemory::alloc(gpu, 16)?;
        let compute = Self { kind, kernels: gpu.kernels()?, shape, sums, read_back, stream, gpu: gpu.clone() };
        // At their first use the driver and cuBLAS load code. That takes time, and GPU memory, which is measured later.
        let warm = DeviceMemory::new(gpu, shape.bytes())?;
        compute.stream.zero(warm.address, shape.bytes())?;
        compute.work(warm.address, Amount(1))?;
        compute.kernels.sum(&compute.stream, warm.address, shape.bytes(), 0, compute.sums.address)?;
        compute.stream.synchronize()?;
        Ok(compute)
    }

    /// Puts work with the tensor at a device address on the stream. An amount of zero means no work.
    pub(crate) fn work(&self, address: u64, amount: Amount) -> Result {
        match &self.kind {
            Kind::Products { blas, tokens, x, y } => {
                let Shape { rows, cols } = self.shape;
                let product = Product { m: *tokens, n: rows, k: cols, x: x.address, w: address, y: y.address };
                (0..amount.0).try_for_each(|_| blas.multiply(product))
            }
            Kind::Sums if amount.0 == 0 => Ok(()),
            Kind::Sums => self.kernels.sum(&self.stream, address, self.shape.bytes(), amount.0 - 1, self.sums.address),
        }
    }

    /// Seconds on the GPU that the work with `count` tensors takes, one after another, all at one address.
    pub(crate) fn seconds(&self, address: u64, amount: Amount, count: u64) -> Result<f64> {
        self.ended_if_failed(self.timed(address, amount, count))
    }

    /// Passes an outcome on. After a failure it first waits until all submitted work has ended, so the caller may
    /// unpin.
    fn ended_if_failed<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.inspect_err(|_| drop(self.stream.synchronize()))
    }

    fn timed(&self, address: u64, amount: Amount, count: u64) -> Result<f64> {
        let (start, end) = (self.gpu.event(EventKind::Timed)?, self.gpu.event(EventKind::Timed)?);
        self.work(address, Amount(1))?;
        self.stream.record(&start)?;
        (0..count).try_for_each(|_| self.work(address, amount))?;
        self.stream.record(&end)?;
        end.synchronize()?;
        start.seconds_to(&end)
    }

    /// The amount whose work with one tensor takes about `seconds`.
    pub(crate) fn amount_for(&self, address: u64, seconds: f64) -> Result<Amount> {
        const REPEATS: u64 = 8;
        let mut amount = 1;
        // The first use pays for loading, and for clocks that are still rising.
        self.seconds(address, Amount(amount), REPEATS)?;
        loop {
            let one = self.seconds(address, Amount(amount), REPEATS)? / REPEATS as f64;
            let wanted = seconds / one.max(1e-9) * amount as f64;
            // Close enough: the remaining difference is rounding, since half a product cannot be computed.
            if one >= seconds / 2.0 || amount > 1 << 20 {
                return Ok(Amount((wanted.round() as u64).max(1)));
            }
            amount = (wanted.ceil() as u64).clamp(amount + 1, amount.saturating_mul(64));
        }
    }

    /// The sum of a tensor's words, as the GPU sees them. Waits for the stream.
    pub(crate) fn sum(&mut self, address: u64) -> Result<u64> {
        let submitted = (|| {
            self.stream.zero(self.sums.address, 16)?;
            self.kernels.sum(&self.stream, address, self.shape.bytes(), 0, self.sums.address)?;
            self.stream.copy_out(self.sums.address, &self.read_back, 0, 8)
        })();
        self.ended_if_failed(submitted)?;
        self.stream.synchronize()?;
        let mut word = [0; 8];
        word.copy_from_slice(&self.read_back.bytes_mut()?[..8]);
        Ok(u64::from_le_bytes(word))
    }
}
