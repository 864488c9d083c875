//! The two rounds of mutating webhooks and policies.
//!
//! In: the calls of a plugin, and the object before and after its round. Out: the calls of the second round.
//! A call is repeated if it may be reinvoked and the object changed after it, by the same plugin or a later
//! one. Upstream: `webhookReinvokeContext`, `policyReinvokeContext`.

use std::collections::BTreeSet;

use apiserver::admission::Attributes;

/// The state that the first round of a plugin keeps for the second.
#[derive(Default)]
struct Memory {
    /// The object after the plugin's changes.
    output: Option<Vec<u8>>,
    /// Calls that may be repeated, since the last change.
    called: BTreeSet<String>,
    /// Calls to repeat.
    again: BTreeSet<String>,
}

/// The rounds of the plugin with this name.
#[derive(Clone, Copy)]
pub(crate) struct Rounds(pub &'static str);

impl Rounds {
    fn memory<'a>(self, attributes: &'a mut Attributes<'_>) -> &'a mut Memory {
        attributes.reinvocation.memory(self.0)
    }

    /// Starts a round.
    pub fn begin(self, attributes: &mut Attributes<'_>) {
        if attributes.reinvocation.is_again() {
            let now = encoded(attributes);
            let memory = self.memory(attributes);
            if memory.output != now {
                memory.again.append(&mut memory.called);
            }
        }
    }

    /// Whether this round makes the call. A call that did not match in the first round is not made in the
    /// second.
    pub fn calls(self, attributes: &mut Attributes<'_>, call: &str) -> bool {
        !attributes.reinvocation.is_again() || self.memory(attributes).again.contains(call)
    }

    /// Notes a call that was made.
    pub fn called(
        self,
        attributes: &mut Attributes<'_>,
        call: &str,
        changed: bool,
        reinvoked: bool,
    ) {
        let memory = self.memory(attributes);
        if changed {
            memory.again.append(&mut memory.called);
        }
        if reinvoked {
            memory.called.insert(call.to_owned());
        }
        if changed {
            attributes.reinvocation.ask();
        }
    }

    /// Ends a round.
    pub fn end(self, attributes: &mut Attributes<'_>) {
        let now = encoded(attributes);
        self.memory(attributes).output = now;
    }
}

fn encoded(attributes: &Attributes<'_>) -> Option<Vec<u8>> {
    attributes.object.as_deref().map(|object| object.encode())
}
