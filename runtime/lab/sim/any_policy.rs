//! Policies by name: those that ship, and a program's own.

use std::hash::{Hash, Hasher};
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::pager::{Policy, PolicyKind};

/// A policy that the program brings, and the name that users select it by.
#[derive(Clone, Copy, Debug)]
pub struct OwnPolicy {
    name: &'static str,
    build: fn() -> Box<dyn Policy>,
}

impl OwnPolicy {
    /// Makes an entry; `build` makes a new policy for each cache. A name that a [`PolicyKind`] has hides that kind.
    pub const fn new(name: &'static str, build: fn() -> Box<dyn Policy>) -> Self {
        Self { name, build }
    }

    /// Returns the name users select it by.
    pub const fn name(self) -> &'static str {
        self.name
    }
}

/// A shipped policy, or one of the program's own. Two are equal if they have the same name.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum AnyPolicy {
    /// A shipped policy.
    Kind(PolicyKind),
    /// A policy of the program's own.
    Own(OwnPolicy),
}

impl AnyPolicy {
    /// Returns the policy of this name, first among `own`, then among those that ship.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::error::ErrorKind::InvalidArgument) if there is none; the message lists the names.
    pub fn find(name: &str, own: &[OwnPolicy]) -> Result<Self> {
        if let Some(own) = own.iter().find(|own| own.name == name) {
            return Ok(Self::Own(*own));
        }
        name.parse().map(Self::Kind).map_err(|error: Error| {
            if own.is_empty() {
                return error;
            }
            let names = own.iter().map(|own| own.name).collect::<Vec<_>>().join(", ");
            let remedy = format!("{}; and of this program's own: {names}", error.advice().unwrap_or_default());
            error.remedy(remedy)
        })
    }

    /// Returns the name users select it by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kind(kind) => kind.name(),
            Self::Own(own) => own.name,
        }
    }

    /// Makes a new policy of this kind.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::Kind(kind) => kind.build(),
            Self::Own(own) => (own.build)(),
        }
    }
}

impl From<PolicyKind> for AnyPolicy {
    fn from(kind: PolicyKind) -> Self {
        Self::Kind(kind)
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
