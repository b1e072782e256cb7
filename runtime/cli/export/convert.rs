//! Values of one type to values of another, on several threads, in buffers of a fixed size.

use std::thread;

use outcore_quants::{WeightType, dequantise, quantise};

/// Elements that a thread converts at a time: whole blocks of every type.
pub const PIECE: u64 = 1 << 18;
/// Bytes that a thread has for values and for what they become.
pub const PIECE_BYTES: u64 = 2 * 4 * PIECE;
/// Below this, no type makes infinite numbers of finite ones: its scales are at most as large as the largest number,
/// and f16 holds four times as much.
const HARMLESS: f32 = 16_384.0;

/// The buffers of a thread.
#[derive(Debug, Default)]
struct Lane {
    values: Vec<f32>,
    bytes: Vec<u8>,
}

/// An element that cannot be exported: its place in what was converted, and its value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Refused {
    pub at: u64,
    pub value: f32,
}

/// Converts pieces, each on a thread of its own.
#[derive(Debug)]
pub struct Lanes(Vec<Lane>);

impl Lanes {
    /// Makes as many as there are threads, at least one.
    pub fn new(threads: u64) -> Self {
        Self((0..threads.max(1)).map(|_| Lane::default()).collect())
    }

    /// How many elements are converted at a time.
    pub fn elements(&self) -> u64 {
        self.0.len() as u64 * PIECE
    }

    /// Converts whole blocks, of at most [`elements`](Self::elements). What they become is in the parts that are
    /// returned, one behind the other.
    ///
    /// # Errors
    /// The first element that is no finite number, or that is none in the new type.
    pub fn convert(
        &mut self,
        from: WeightType,
        to: WeightType,
        source: &[u8],
    ) -> Result<impl Iterator<Item = &[u8]>, Refused> {
        let piece_bytes = PIECE as usize / from.block_elements() * from.block_bytes();
        let pieces = source.chunks(piece_bytes);
        let used = pieces.len().min(self.0.len());
        let done: Vec<Result<(), Refused>> = thread::scope(|scope| {
            let mut work = self.0.iter_mut().zip(pieces);
            // This thread does the first part.
            let first = work.next();
            let others: Vec<_> = work.map(|(lane, piece)| scope.spawn(move || lane.convert(from, to, piece))).collect();
            let first = first.map(|(lane, piece)| lane.convert(from, to, piece));
            let others = others.into_iter().map(|thread| thread.join());
            // A panic of a thread goes on here.
            first
                .into_iter()
                .chain(others.map(|done| done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))))
                .collect()
        });
        for (nth, done) in done.into_iter().enumerate() {
            done.map_err(|refused| Refused { at: nth as u64 * PIECE + refused.at, ..refused })?;
        }
        Ok(self.0.iter().take(used).map(|lane| lane.bytes.as_slice()))
    }
}

impl Lane {
    fn convert(&mut self, from: WeightType, to: WeightType, source: &[u8]) -> Result<(), Refused> {
        let elements = source.len() / from.block_bytes() * from.block_elements();
        self.values.resize(elements, 0.0);
        dequantise(from, source, &mut self.values);
        refuse(&self.values, |value| !value.is_finite())?;
        self.bytes.clear();
        if from == to {
            self.bytes.extend_from_slice(source);
            return Ok(());
        }
        // No more than that: it grows by doubling otherwise.
        self.bytes.reserve_exact(elements / to.block_elements() * to.block_bytes());
        quantise(to, &self.values, &mut self.bytes);
        let largest = self.values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        if largest < HARMLESS || to == WeightType::F32 {
            return Ok(());
        }
        let values = std::mem::take(&mut self.values);
        self.values.resize(elements, 0.0);
        dequantise(to, &self.bytes, &mut self.values);
        refuse(&self.values, |value| !value.is_finite()).map_err(|Refused { at, .. }| {
            let block = to.block_elements();
            let of_block = values.chunks(block).nth(at as usize / block).unwrap_or_default().iter().enumerate();
            // Of a block, the largest number is to blame.
            let far = of_block.fold((0, 0f32), |far, (i, v)| if v.abs() > far.1.abs() { (i, *v) } else { far });
            Refused { at: (at as usize / block * block + far.0) as u64, value: far.1 }
        })
    }
}

fn refuse(values: &[f32], is_wrong: impl Fn(f32) -> bool) -> Result<(), Refused> {
    match values.iter().position(|value| is_wrong(*value)) {
        Some(at) => Err(Refused { at: at as u64, value: values.get(at).copied().unwrap_or_default() }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;

    fn plain(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn converted(threads: u64, to: WeightType, values: &[f32]) -> Result<Vec<u8>, Refused> {
        let mut lanes = Lanes::new(threads);
        assert!(values.len() as u64 <= lanes.elements());
        let parts: Vec<Vec<u8>> = lanes.convert(WeightType::F32, to, &plain(values))?.map(<[u8]>::to_vec).collect();
        Ok(parts.concat())
    }

    /// The number of threads changes nothing, where pieces are whole and where the last is short.
    #[test]
    fn threads_make_the_bytes_of_one() {
        let values: Vec<f32> = (0..2 * PIECE as usize + 512).map(|i| ((i * 37) % 1001) as f32 - 500.0).collect();
        let mut whole = Vec::new();
        quantise(WeightType::Q4_K, &values, &mut whole);
        assert_eq!(converted(3, WeightType::Q4_K, &values), Ok(whole.clone()));
        let (head, tail) = values.split_at(PIECE as usize);
        let parts = [head, &tail[..PIECE as usize], &tail[PIECE as usize..]];
        let parts: Vec<u8> = parts.iter().flat_map(|part| converted(1, WeightType::Q4_K, part).unwrap()).collect();
        assert_eq!(parts, whole);
    }

    #[test]
    fn what_is_no_number_or_becomes_none_is_found() {
        let mut values = vec![1f32; 2 * PIECE as usize];
        let far = PIECE as usize + 33;
        for (wrong, to) in [
            (f32::NAN, WeightType::F32),
            (f32::INFINITY, WeightType::Q4_0),
            (f32::NEG_INFINITY, WeightType::BF16),
            (65_520.0, WeightType::F16),
            (-1e7, WeightType::Q8_0),
            (1e6, WeightType::Q4_1),
            (1e9, WeightType::Q6_K),
            (f32::MAX, WeightType::BF16),
        ] {
            values[far] = wrong;
            let refused = converted(2, to, &values).unwrap_err();
            assert_eq!((refused.at, refused.value.to_bits()), (far as u64, wrong.to_bits()), "{to}");
        }
        for (large, to) in [(65_504.0, WeightType::F16), (8e6, WeightType::Q8_0), (-3e38, WeightType::BF16)] {
            values[far] = large;
            converted(2, to, &values).unwrap();
        }
    }
}
