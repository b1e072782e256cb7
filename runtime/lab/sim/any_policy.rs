//! Policies by name: those that ship, baselines, and a program's own.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use outcore::RuntimeBuilder;

use super::baselines::Baseline;
use crate::error::{Error, ErrorKind, Result, closest};
use crate::pager::{Policy, PolicyKind};

/// A policy that the program brings, and the name that users select it by.
///
/// Tables, reports and JSON show that name, too; [`Policy::name`] is what a runtime's `Stats::policy` shows. So one
/// type may be several entries, with other settings under each name.
#[derive(Clone, Copy, Debug)]
pub struct OwnPolicy {
    name: &'static str,
    build: fn() -> Box<dyn Policy>,
}

impl OwnPolicy {
    /// Makes an entry; `build` makes a new policy for each cache. The name of a [`PolicyKind`] or a
    /// [`Baseline`] hides that one.
    pub const fn new(name: &'static str, build: fn() -> Box<dyn Policy>) -> Self {
        Self { name, build }
    }

    /// Returns the name users select it by.
    pub const fn name(self) -> &'static str {
        self.name
    }
}

/// A policy that a runtime can be opened with, a baseline, or a policy of the program's own. Two are equal if they
/// have the same name.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum AnyPolicy {
    /// A policy that a runtime can be opened with.
    Kind(PolicyKind),
    /// A policy to compare others with.
    Baseline(Baseline),
    /// A policy of the program's own.
    Own(OwnPolicy),
}

impl AnyPolicy {
    /// Returns all policies: those that a runtime can be opened with and the baselines, except for names that `own`
    /// hides, and then `own`.
    pub fn all(own: &[OwnPolicy]) -> impl Iterator<Item = Self> {
        let hidden = |policy: &Self| own.iter().any(|own| own.name == policy.name());
        let kinds = PolicyKind::ALL.into_iter().map(Self::Kind);
        let shipped = kinds.chain(Baseline::ALL.into_iter().map(Self::Baseline)).filter(move |policy| !hidden(policy));
        shipped.chain(own.iter().map(|own| Self::Own(*own)))
    }

    /// Returns the policy of this name, first among `own`, then among the others.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is none; the message lists the names, and the closest.
    pub fn find(name: &str, own: &[OwnPolicy]) -> Result<Self> {
        Self::find_or(name, own, &[])
    }

    /// As [`find`](Self::find), for a caller that also takes the names `also`: the message lists them, too.
    ///
    /// # Errors
    /// As for [`find`](Self::find).
    pub fn find_or(name: &str, own: &[OwnPolicy], also: &[&'static str]) -> Result<Self> {
        Self::all(own).find(|policy| policy.name() == name).ok_or_else(|| {
            let names: Vec<&str> = Self::all(own).map(Self::name).chain(also.iter().copied()).collect();
            let near = closest(name, names.iter().copied());
            let near = near.map_or_else(String::new, |near| format!("the closest name is {near}; "));
            Error::new(ErrorKind::InvalidArgument, format!("policy {name:?} does not exist"))
                .remedy(format!("{near}choose one of: {}", names.join(", ")))
        })
    }

    /// Returns the name users select it by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kind(kind) => kind.name(),
            Self::Baseline(baseline) => baseline.name(),
            Self::Own(own) => own.name,
        }
    }

    /// Makes a new policy of this kind.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::Kind(kind) => kind.build(),
            Self::Baseline(baseline) => baseline.build(),
            Self::Own(own) => (own.build)(),
        }
    }

    /// Returns the builder with this policy.
    pub fn set_on(self, builder: RuntimeBuilder) -> RuntimeBuilder {
        match self {
            Self::Kind(kind) => builder.policy(kind),
            Self::Baseline(_) | Self::Own(_) => builder.custom_policy(move || self.build()),
        }
    }
}

impl From<PolicyKind> for AnyPolicy {
    fn from(kind: PolicyKind) -> Self {
        Self::Kind(kind)
    }
}

impl From<Baseline> for AnyPolicy {
    fn from(baseline: Baseline) -> Self {
        Self::Baseline(baseline)
    }
}

impl fmt::Display for AnyPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for AnyPolicy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::find(name, &[])
    }
}

impl PartialEq for AnyPolicy {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for AnyPolicy {}

impl Hash for AnyPolicy {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name().hash(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_own_policy_hides_the_shipped_one_of_its_name() {
        let own = [OwnPolicy::new("lru", || Baseline::Mru.build()), OwnPolicy::new("mine", || PolicyKind::Lru.build())];
        let names: Vec<_> = AnyPolicy::all(&own).map(AnyPolicy::name).collect();
        assert_eq!(names.len(), PolicyKind::ALL.len() + Baseline::ALL.len() + 1);
        assert!(names.ends_with(&["random", "lru", "mine"]) && !names.starts_with(&["lru"]), "{names:?}");
        let lru = AnyPolicy::all(&own).find(|policy| policy.name() == "lru").map(|policy| policy.build().name());
        assert_eq!((lru, AnyPolicy::find("lru", &own).unwrap().build().name()), (Some("mru"), "mru"));
    }

    #[test]
    fn the_closest_name_is_looked_for_among_all() {
        let own = [OwnPolicy::new("mine", || PolicyKind::Lru.build())];
        for (wrong, near) in [("minne", "mine"), ("siev", "sieve"), ("alll", "all")] {
            let error = AnyPolicy::find_or(wrong, &own, &["all"]).unwrap_err().to_string();
            assert!(error.contains(&format!("the closest name is {near};")), "{error}");
        }
    }
}
