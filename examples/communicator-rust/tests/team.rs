// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks that meet, and what the others hear of one that does not do its part.

use ibgda_communicator::{Coordinator, Error, Team};
use std::{
    io::Write as _,
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

const PATIENCE: Duration = Duration::from_secs(20);

fn coordinator(size: u16, patience: Duration) -> (Coordinator, String) {
    let coordinator = Coordinator::start("127.0.0.1:0", size, patience).expect("a free port");
    let address = coordinator.address().to_string();
    (coordinator, address)
}

fn join(address: &str, rank: u16, size: u16) -> Team {
    Team::join(address, rank, size, PATIENCE).expect("the coordinator listens")
}

#[test]
fn all_hear_what_each_has_said_in_every_exchange() {
    let (_coordinator, address) = coordinator(4, PATIENCE);
    thread::scope(|scope| {
        for rank in 0..4 {
            let address = &address;
            scope.spawn(move || {
                let team = join(address, rank, 4);
                for round in 0..50_u16 {
                    let mine = vec![(rank * 7 + round) as u8; usize::from(rank) * 100];
                    let all = team.exchange(&mine).expect("all ranks are well");
                    for (of, piece) in (0_u16..).zip(all) {
                        assert_eq!(piece, vec![(of * 7 + round) as u8; usize::from(of) * 100]);
                    }
                }
                team.leave();
            });
        }
    });
}

#[test]
fn strangers_and_second_ones_do_not_disturb() {
    let (_coordinator, address) = coordinator(2, PATIENCE);
    // Both say that they are rank 0; whose word is heard first is.
    let two = [join(&address, 0, 2), join(&address, 0, 2)];
    let moment = Duration::from_millis(10);
    let end = Instant::now() + PATIENCE;
    let (error, second) = loop {
        let refused = (0..2).find_map(|at| Some((two[at].failure(moment)?, at)));
        match refused {
            Some(refused) => break refused,
            None => assert!(Instant::now() < end, "neither is refused"),
        }
    };
    assert!(
        error.to_string().contains("there is a rank 0 already"),
        "{error}"
    );
    let zero = &two[1 - second];
    let mut stranger = TcpStream::connect(&address).expect("the coordinator listens");
    stranger
        .write_all(b"GET / HTTP/1.1\r\n\r\n")
        .expect("it is heard");
    let _silent = TcpStream::connect(&address).expect("the coordinator listens");
    let refused = join(&address, 1, 3);
    let error = refused.failure(PATIENCE).expect("it is refused");
    assert!(error.to_string().contains("2 ranks, not 3"), "{error}");
    let one = join(&address, 1, 2);
    thread::scope(|scope| {
        scope.spawn(|| one.exchange(b"one").expect("both are well"));
        let heard = zero.exchange(b"zero").expect("both are well");
        assert_eq!(heard, [b"zero".to_vec(), b"one".to_vec()]);
    });
    zero.leave();
    one.leave();
}

/// Both others hear that rank 1 is gone, by its name, without delay.
fn hear_of_one(fails: impl FnOnce(Team), words: &str) {
    let (_coordinator, address) = coordinator(3, PATIENCE);
    let [zero, one, two] = [0, 1, 2].map(|rank| join(&address, rank, 3));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| zero.exchange(&[]).expect_err("rank 1 does not come"));
        thread::sleep(Duration::from_millis(100));
        let start = Instant::now();
        fails(one);
        for error in [
            waiting.join().expect("it does not panic"),
            two.failure(PATIENCE).expect("it hears of it"),
        ] {
            let Error::RankGone { rank: 1, why } = &error else {
                panic!("{error}");
            };
            assert!(why.contains(words), "{why}");
        }
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "{:?}",
            start.elapsed()
        );
    });
    zero.leave();
    two.leave();
}

#[test]
fn one_that_ends_without_a_word_is_named() {
    hear_of_one(drop, "its process has ended, or its host");
}

#[test]
fn one_that_comes_after_a_failure_hears_of_it() {
    let (_coordinator, address) = coordinator(2, PATIENCE);
    join(&address, 1, 2).fail("the policy does not allow it");
    let zero = join(&address, 0, 2);
    let error = zero.failure(PATIENCE).expect("it is told");
    let Error::RankGone { rank: 1, why } = &error else {
        panic!("{error}");
    };
    assert!(why.contains("the policy does not allow it"), "{why}");
    zero.leave();
}

#[test]
fn one_that_fails_is_named_with_its_own_words() {
    hear_of_one(|team| team.fail("the NIC was reset"), "the NIC was reset");
}

#[test]
fn a_hook_is_called_once_a_rank_is_gone_and_at_once_if_one_is() {
    use std::sync::mpsc::channel;
    let (_coordinator, address) = coordinator(2, PATIENCE);
    let [zero, one] = [0, 1].map(|rank| join(&address, rank, 2));
    let (sender, called) = channel();
    let again = sender.clone();
    zero.on_failure(Some(Box::new(move || sender.send(1).expect("it is heard"))));
    assert!(called.recv_timeout(Duration::from_millis(50)).is_err());
    drop(one);
    assert_eq!(called.recv_timeout(PATIENCE), Ok(1));
    zero.on_failure(Some(Box::new(move || again.send(2).expect("it is heard"))));
    assert_eq!(called.try_recv(), Ok(2));
    zero.leave();
}

#[test]
fn one_that_never_comes_is_named_and_so_is_one_that_does_not_come_to_an_exchange() {
    let short = Duration::from_secs(1);
    let (_coordinator, address) = coordinator(2, short);
    let zero = join(&address, 0, 2);
    let error = zero.exchange(&[]).expect_err("rank 1 is not there");
    assert!(
        error
            .to_string()
            .contains("rank 1 is gone: it did not come to the meeting within 1 s"),
        "{error}"
    );
    zero.leave();

    let (_coordinator, address) = coordinator(2, short);
    let [zero, one] = [0, 1].map(|rank| join(&address, rank, 2));
    let error = zero.exchange(&[]).expect_err("rank 1 does not come");
    assert!(
        error
            .to_string()
            .contains("rank 1 is gone: it did not come to the exchange within 1 s"),
        "{error}"
    );
    zero.leave();
    one.leave();
}

#[test]
fn where_nobody_listens_the_wait_ends() {
    // A port that was free a moment ago.
    let address = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        listener.local_addr().expect("it is bound").to_string()
    };
    let error = Team::join(&address, 0, 2, Duration::from_millis(300)).expect_err("nobody listens");
    assert!(error.to_string().contains(&address), "{error}");
    for (rank, size) in [(0, 1), (2, 2), (0, 17)] {
        Team::join(&address, rank, size, PATIENCE).expect_err("no such team");
    }
}
