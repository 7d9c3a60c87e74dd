//! Measures the round-trip time to another machine.
//!
//! ```text
//! one$ cargo run -p fusionllm-transport --example ping
//! listening; on the other machine: ping aeaa…
//! two$ cargo run -p fusionllm-transport --example ping -- aeaa…
//! fastest of ten round trips: 412 µs
//! ```

use std::error::Error;
use std::time::Instant;

use fusionllm_transport::{Endpoint, EndpointOptions, Lane, Secret, Ticket};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1) {
        None => listen().await,
        Some(ticket) => ping(ticket.parse()?).await,
    }
}

async fn listen() -> Result<(), Box<dyn Error>> {
    let endpoint = Endpoint::bind(EndpointOptions::new()).await?;
    let ticket = Ticket::new(endpoint.addr(), Secret::generate());
    println!("listening; on the other machine: ping {ticket}");
    answer(endpoint, ticket.secret).await
}

async fn answer(endpoint: Endpoint, secret: Secret) -> Result<(), Box<dyn Error>> {
    let (connection, mut lanes) = endpoint.accept().await.ok_or("closed")?;

    let hello = lanes.control.next().await?.ok_or("no hello")?;
    let shown = hello.header().first_chunk::<16>().copied().map(Secret::from_bytes);
    if shown != Some(secret) {
        connection.close("the ticket's secret is wrong");
        return Err(format!("{} sent a wrong secret", connection.peer()).into());
    }
    while let Some(frame) = lanes.control.next().await? {
        let header = frame.header().clone();
        connection.send(Lane::Control, &header, &[]).await?;
    }
    endpoint.close("done").await;
    Ok(())
}

async fn ping(ticket: Ticket) -> Result<(), Box<dyn Error>> {
    let endpoint = Endpoint::bind(EndpointOptions::new()).await?;
    let (connection, mut lanes) = endpoint.connect(&ticket.addr).await?;
    connection.send(Lane::Control, ticket.secret.as_bytes(), &[]).await?;

    let mut fastest = None;
    for i in 0..10u8 {
        let start = Instant::now();
        connection.send(Lane::Control, &[i], &[]).await?;
        lanes.control.next().await?.ok_or("no answer")?;
        fastest = fastest.into_iter().chain([start.elapsed()]).min();
    }
    println!("fastest of ten round trips: {:.0?}", fastest.unwrap_or_default());
    connection.finish().await?;
    endpoint.close("done").await;
    Ok(())
}

#[tokio::test]
async fn a_machine_pings_itself() {
    let endpoint = Endpoint::bind(EndpointOptions::new()).await.unwrap();
    let ticket = Ticket::new(endpoint.addr(), Secret::generate());
    let (answered, pinged) = tokio::join!(answer(endpoint, ticket.secret.clone()), ping(ticket));
    answered.unwrap();
    pinged.unwrap();
}
