//! The emulated CUDA driver, with what kernels.ptx does done by the host.

use std::sync::atomic::{AtomicU64, Ordering};

use outcore_testkit::fake_cuda::{Fake, Reach};
use outcore_testkit::soak_kernels;

/// A device address that a kernel was given, and how far behind it nothing is mapped.
static GIVEN: AtomicU64 = AtomicU64::new(0);
const FAR: u64 = 1 << 40;

/// The driver, with what kernels.ptx does done by the host.
pub fn driver() -> Fake {
    let fake = Fake::load();
    fake.register_kernel(
        "outcore_spin",
        |launch| vec![Reach::write(launch.parameter(1), u64::from(launch.grid[0] * launch.block[0]) * 8)],
        |launch| {
            let threads = (launch.grid[0] * launch.block[0]) as usize;
            let steps = launch.parameter(0);
            let last =
                (0..steps).fold(1_u64, |x, _| std::hint::black_box(x).wrapping_mul(6_364_136_223_846_793_005) + 1);
            launch.write::<u64>(launch.parameter(1), threads).fill(last);
        },
    );
    fake.register_kernel(
        "outcore_sum",
        |launch| {
            GIVEN.store(launch.parameter(3), Ordering::Relaxed);
            vec![Reach::read(launch.parameter(0), launch.parameter(1) * 8), Reach::write(launch.parameter(3), 16)]
        },
        |launch| {
            let words = launch.read::<u64>(launch.parameter(0), launch.parameter(1) as usize);
            let mut sum = words.iter().fold(0_u64, |sum, word| sum.wrapping_add(*word));
            // The steps take time and leave the sum alone.
            sum ^= (0..launch.parameter(2)).fold(0, |x: u64, _| std::hint::black_box(x));
            let out = launch.write::<u64>(launch.parameter(3), 2);
            out[0] = out[0].wrapping_add(sum);
        },
    );
    // A trap ends the use of the GPU, as a stray access does.
    fake.register_kernel("outcore_trap", |_| vec![Reach::write(GIVEN.load(Ordering::Relaxed) + FAR, 8)], |_| ());
    soak_kernels::register(&fake);
    fake
}
