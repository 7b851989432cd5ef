// SPDX-License-Identifier: GPL-2.0
//! The states of a session: `UNBOUND → READY → LOST → RECOVERED → READY …`.

/// Why a session was lost; the numbers are `IBGDA_REASON_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Reason {
    /// The driver reset the NIC; it will be back.
    NicReset = 1,
    /// The NIC was unbound or removed.
    NicRemoved = 2,
    /// The GPU was unbound or removed.
    GpuRemoved = 3,
    /// The policy no longer allows the pair.
    Policy = 4,
    /// The owner destroyed the UAR; never the reason of a whole session's loss.
    UarDestroyed = 5,
}

impl Reason {
    /// Whether the loss ends when the NIC is back.
    const fn ends_with_the_nic(self) -> bool {
        matches!(self, Self::NicReset | Self::NicRemoved)
    }
}

/// State of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// No pair yet.
    Unbound,
    /// Doorbells may be imported and rung.
    Ready,
    /// Everything granted is revoked.
    Lost(Reason),
    /// As lost, but the NIC is there again: a rebind will succeed.
    Recovered(Reason),
}

/// What a request finds instead of a ready session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotReady {
    /// Never bound.
    Unbound,
    /// Lost, and not bound again.
    Lost,
}

/// A session's state and generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    state: State,
    generation: u32,
}

impl Life {
    /// An unbound session.
    pub const fn new() -> Self {
        Self {
            state: State::Unbound,
            generation: 0,
        }
    }

    /// The state.
    pub const fn state(&self) -> State {
        self.state
    }

    /// 0 before bind, 1 after, and one more at each return.
    pub const fn generation(&self) -> u32 {
        self.generation
    }

    /// Whether it was ever bound.
    pub const fn is_bound(&self) -> bool {
        !matches!(self.state, State::Unbound)
    }

    /// Whether there is something to return to with [`Self::rebind`].
    pub const fn is_lost(&self) -> bool {
        matches!(self.state, State::Lost(_) | State::Recovered(_))
    }

    /// Fails unless doorbells may be imported and rung.
    pub const fn ready(&self) -> Result<(), NotReady> {
        match self.state {
            State::Ready => Ok(()),
            State::Unbound => Err(NotReady::Unbound),
            State::Lost(_) | State::Recovered(_) => Err(NotReady::Lost),
        }
    }

    /// First bind. `false`: it was bound before.
    pub fn bind(&mut self) -> bool {
        if self.is_bound() {
            return false;
        }
        self.state = State::Ready;
        self.generation = 1;
        true
    }

    /// Takes everything away. `false`: there was nothing to take, only the reason may have changed.
    pub fn lose(&mut self, reason: Reason) -> bool {
        match self.state {
            State::Unbound => false,
            State::Ready | State::Recovered(_) => {
                self.state = State::Lost(reason);
                true
            }
            State::Lost(before) => {
                // A reset that failed ends in removal. Any other second loss adds nothing for the owner, and the first
                // reason is the one that explains what it saw.
                if before == Reason::NicReset && reason == Reason::NicRemoved {
                    self.state = State::Lost(reason);
                }
                false
            }
        }
    }

    /// The NIC is back. `false`: that is not what the session waits for.
    pub fn recover(&mut self) -> bool {
        match self.state {
            State::Lost(reason) if reason.ends_with_the_nic() => {
                self.state = State::Recovered(reason);
                self.generation = self.generation.wrapping_add(1);
                true
            }
            _ => false,
        }
    }

    /// Ready again. `false`: it was not lost.
    pub fn rebind(&mut self) -> bool {
        match self.state {
            State::Recovered(_) => {}
            // Lost for a reason that ended without the NIC's going: this is the return.
            State::Lost(_) => self.generation = self.generation.wrapping_add(1),
            State::Unbound | State::Ready => return false,
        }
        self.state = State::Ready;
        true
    }

    /// Word 0 of the status page.
    pub const fn state_word(&self) -> u64 {
        let state = match self.state {
            State::Unbound => 0,
            State::Ready => 1,
            State::Lost(_) => 2,
            State::Recovered(_) => 3,
        };
        ((self.generation as u64) << 32) | state
    }

    /// Word 1 of the status page.
    pub const fn reason_word(&self) -> u64 {
        match self.state {
            State::Unbound | State::Ready => 0,
            State::Lost(reason) | State::Recovered(reason) => (reason as u64) << 32,
        }
    }
}

impl Default for Life {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const REASONS: [Reason; 4] = [
        Reason::NicReset,
        Reason::NicRemoved,
        Reason::GpuRemoved,
        Reason::Policy,
    ];

    /// Every life reachable by `depth` events, with what each event answered.
    fn explore(depth: usize, visit: &mut impl FnMut(Life, Life, &str, bool)) {
        let mut lives = Vec::from([Life::new()]);
        for _ in 0..depth {
            let mut next = Vec::new();
            for &before in &lives {
                let mut event = |name: &str, act: &dyn Fn(&mut Life) -> bool| {
                    let mut after = before;
                    let answer = act(&mut after);
                    visit(before, after, name, answer);
                    if !next.contains(&after) {
                        next.push(after);
                    }
                };
                event("bind", &Life::bind);
                event("recover", &Life::recover);
                event("rebind", &Life::rebind);
                for reason in REASONS {
                    event("lose", &move |life: &mut Life| life.lose(reason));
                }
            }
            lives = next;
        }
    }

    #[test]
    fn in_all_histories_a_loss_is_announced_once_and_a_return_is_a_new_generation() {
        explore(8, &mut |before, after, event, answer| {
            assert!(after.generation() >= before.generation());
            match event {
                "bind" => assert_eq!(answer, !before.is_bound()),
                "lose" => {
                    assert_eq!(
                        answer,
                        after.is_lost() && !matches!(before.state(), State::Lost(_))
                    );
                    assert_eq!(after.generation(), before.generation());
                    assert!(after.ready().is_err());
                }
                "recover" => assert_eq!(answer, after.generation() == before.generation() + 1),
                "rebind" => {
                    assert_eq!(answer, before.is_lost());
                    if answer {
                        // Whoever saw the loss in one generation never takes a later one for it.
                        let at_loss = before.generation()
                            - u32::from(matches!(before.state(), State::Recovered(_)));
                        assert_eq!(after.generation(), at_loss + 1);
                        assert_eq!(after.ready(), Ok(()));
                    }
                }
                _ => unreachable!(),
            }
            assert_eq!(after.state_word() >> 32, u64::from(after.generation()));
            assert_eq!(after.reason_word() == 0, !after.is_lost());
        });
    }

    #[test]
    fn a_policy_loss_does_not_end_with_the_nic() {
        let mut life = Life::new();
        assert!(life.bind() && life.lose(Reason::Policy));
        assert!(!life.recover());
        assert!(life.rebind());
        assert_eq!(life.generation(), 2);
    }

    #[test]
    fn a_failed_reset_ends_as_a_removal() {
        let mut life = Life::new();
        assert!(life.bind() && life.lose(Reason::NicReset));
        assert!(!life.lose(Reason::NicRemoved));
        assert_eq!(life.state(), State::Lost(Reason::NicRemoved));
    }
}
