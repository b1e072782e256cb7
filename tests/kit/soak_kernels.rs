//! The kernels of the soak as functions of the host, for the emulated CUDA driver. On a GPU the same are in
//! `tests/soak/kernels.cu`.

use outcore_soak::{stamped, sum_of, uploaded, weight};

use crate::fake_cuda::{Fake, Launch, Reach};

/// Gives the kernels their meaning.
pub fn register(fake: &Fake) {
    fake.register_kernel(
        "soak_sum",
        |launch| vec![Reach::read(launch.parameter(0), launch.parameter(1) * 8), Reach::write(launch.parameter(2), 8)],
        |launch| {
            let words = launch.read::<u64>(launch.parameter(0), launch.parameter(1) as usize);
            let sum = sum_of(0, words.iter().copied());
            let out = launch.write::<u64>(launch.parameter(2), 1);
            out[0] = out[0].wrapping_add(sum);
        },
    );
    fake.register_kernel(
        "soak_stamp",
        |launch| vec![Reach::write(launch.parameter(0) + launch.parameter(1) * 8, launch.parameter(2) * 8)],
        |launch| {
            let (first, count) = (launch.parameter(1), launch.parameter(2));
            let (factor, stamp) = (launch.parameter(3), launch.parameter(4));
            let words = launch.write::<u64>(launch.parameter(0) + first * 8, count as usize);
            for (word, place) in words.iter_mut().zip(first..) {
                *word = stamped(*word, place, factor, stamp);
            }
        },
    );
    // What a launch reads is in the table, which may not have been copied when the launch is submitted.
    let reach = |launch: &Launch| {
        let (table, count, words) = (launch.parameter(0), launch.parameter(1), launch.parameter(2));
        let blocks = uploaded(table, count).into_iter().map(|block| Reach::read(block, words * 8));
        blocks.chain([Reach::read(table, count * 8), Reach::write(launch.parameter(3), 8)]).collect()
    };
    fake.register_kernel("soak_table_sum", reach, |launch| {
        let words = launch.parameter(2) as usize;
        let blocks = launch.read::<u64>(launch.parameter(0), launch.parameter(1) as usize);
        let sum = blocks.iter().zip(0..).fold(0_u64, |sum, (block, place)| {
            let words = launch.read::<u64>(*block, words).iter().copied();
            sum.wrapping_add(sum_of(0, words).wrapping_mul(weight(place)))
        });
        let out = launch.write::<u64>(launch.parameter(3), 1);
        out[0] = out[0].wrapping_add(sum);
    });
}
