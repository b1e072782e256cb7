//! Which tenant's answer begins next, where more wait than may be written at a time: start-time fair queueing (Goyal,
//! Vin and Cheng, 1996). Tenants get tokens in proportion to their weights, however many of their requests wait.
//!
//! The permits of `outcore-kv` share something else, room: who has few blocks active is next. A tenant of short answers
//! would always be, and get most of the time.

use std::collections::BTreeMap;

use outcore_kv::TenantId;

/// Each tenant's turns follow each other on a clock that counts tokens for a weight of 1.
#[derive(Debug, Default)]
pub struct Turns {
    /// Where the turn that began last begins.
    clock: f64,
    /// Where each tenant's last turn ends.
    ends: BTreeMap<TenantId, f64>,
}

impl Turns {
    /// Where a tenant's next turn begins. Who had none for a while has saved nothing up.
    pub fn next(&self, tenant: TenantId) -> f64 {
        self.ends.get(&tenant).copied().unwrap_or(0.0).max(self.clock)
    }

    /// A tenant's turn has begun: so many tokens, divided by its weight.
    pub fn begun(&mut self, tenant: TenantId, tokens: f64) {
        self.clock = self.next(tenant);
        self.ends.insert(tenant, self.clock + tokens);
    }

    /// A turn has ended, which took so much more than was thought, or less.
    pub fn ended(&mut self, tenant: TenantId, more: f64) {
        if let Some(end) = self.ends.get_mut(&tenant) {
            *end += more;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_in_proportion_to_weights_and_nobody_saves_up() {
        let [one, other, late] = [1, 2, 3].map(TenantId::new);
        let mut turns = Turns::default();
        let mut counts = BTreeMap::new();
        let mut take = |turns: &mut Turns, of: &[(TenantId, f64)], times: usize| {
            counts.clear();
            for _ in 0..times {
                let next = of.iter().min_by(|a, b| turns.next(a.0).total_cmp(&turns.next(b.0)));
                let Some((tenant, weight)) = next else { continue };
                turns.begun(*tenant, 100.0 / weight);
                *counts.entry(*tenant).or_insert(0) += 1;
            }
            of.iter().map(|(tenant, _)| counts.get(tenant).copied().unwrap_or(0)).collect::<Vec<usize>>()
        };
        assert_eq!(take(&mut turns, &[(one, 1.0), (other, 3.0)], 400), [100, 300]);
        // It comes when the others have had many, and gets no more than its part from then on.
        let found = take(&mut turns, &[(one, 1.0), (other, 1.0), (late, 1.0)], 300);
        assert!(found.iter().all(|count| count.abs_diff(100) <= 3), "{found:?}");
    }
}
