// SPDX-License-Identifier: MIT OR Apache-2.0
//! Answers of the control socket, for people.

use serde_json::Value;

/// Renders the answer to a command.
pub fn render(command: &str, answer: &Value) -> String {
    match command {
        "config" => config(answer),
        "counts" => counters(rows(answer)),
        "refusals" if rows(answer).is_empty() => "nothing was refused\n".into(),
        "refusals" => rows(answer).iter().map(refusal).collect(),
        "help" => rows(answer).iter().map(usage).collect(),
        _ if !rows(answer).is_empty() => table(rows(answer)),
        _ => pairs(answer),
    }
}

/// The list that an answer consists of.
fn rows(answer: &Value) -> &[Value] {
    let lists = answer
        .as_object()
        .into_iter()
        .flat_map(|o| o.values())
        .filter_map(Value::as_array);
    lists.map(Vec::as_slice).next().unwrap_or(&[])
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(s) => s.clone(),
        other => other.to_string(),
    }
}

/// The keys of all rows, in the order of their first appearance.
fn keys(rows: &[Value]) -> Vec<&str> {
    let mut keys: Vec<&str> = Vec::new();
    for key in rows
        .iter()
        .filter_map(Value::as_object)
        .flat_map(|o| o.keys())
    {
        if !keys.contains(&key.as_str()) {
            keys.push(key);
        }
    }
    keys
}

/// One line a row, one column a key.
fn table(rows: &[Value]) -> String {
    let keys = keys(rows);
    let mut lines = vec![keys.iter().map(|k| (*k).to_string()).collect()];
    lines.extend(
        rows.iter()
            .map(|row| keys.iter().map(|k| text(&row[*k])).collect()),
    );
    align(&lines)
}

/// One line a counter, one column a function: there are many more counters than functions.
fn counters(rows: &[Value]) -> String {
    let line = |key: &&str| {
        std::iter::once((*key).to_string())
            .chain(rows.iter().map(|row| text(&row[*key])))
            .collect()
    };
    align(&keys(rows).iter().map(line).collect::<Vec<_>>())
}

fn refusal(record: &Value) -> String {
    let field = |key: &str| text(&record[key]);
    format!(
        "#{} {} {}: {} = {}\n    rule: {}\n    source: {}\n",
        field("seq"),
        field("function"),
        field("object"),
        field("field"),
        field("value"),
        field("rule"),
        field("source"),
    )
}

/// A command: its arguments, each form on a line, and what it does.
fn usage(row: &Value) -> String {
    let name = text(&row["command"]);
    let arguments = row["arguments"].as_str().unwrap_or("");
    let mut forms = arguments.split(" | ");
    let mut lines = format!("{name} {}", forms.next().unwrap_or(""))
        .trim_end()
        .to_owned();
    for form in forms {
        lines.push_str(&format!("\n{:1$} … {form}", "", name.len()));
    }
    format!("{lines}\n    {}\n", text(&row["does"]))
}

/// What `lspci -x` prints and `lspci -F` reads.
fn config(answer: &Value) -> String {
    let lines = rows(answer).iter().enumerate();
    let lines = lines.map(|(i, line)| format!("{:02x}: {}\n", 16 * i, text(line)));
    std::iter::once(format!("00:00.0 {}\n", text(&answer["function"])))
        .chain(lines)
        .collect()
}

fn pairs(answer: &Value) -> String {
    let pairs = answer.as_object().into_iter().flatten();
    align(
        &pairs
            .map(|(key, value)| vec![key.clone(), text(value)])
            .collect::<Vec<_>>(),
    )
}

fn align(lines: &[Vec<String>]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| {
        lines
            .iter()
            .filter_map(|l| l.get(c))
            .map(String::len)
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for line in lines {
        let cells = line
            .iter()
            .zip(&widths)
            .map(|(cell, &width)| format!("{cell:width$}"));
        out += cells.collect::<Vec<_>>().join("  ").trim_end();
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn counts_are_turned() {
        let answer =
            json!({"functions": [{"name": "nic0", "qp": 12}, {"name": "gpu0", "stores": 3}]});
        assert_eq!(
            render("counts", &answer),
            "name    nic0  gpu0\nqp      12    -\nstores  -     3\n"
        );
    }

    #[test]
    fn other_answers() {
        assert_eq!(render("ping", &json!({"pong": true})), "pong  true\n");
        assert_eq!(
            render(
                "help",
                &json!({"commands": [{"command": "ping", "does": "x"}]})
            ),
            "ping\n    x\n"
        );
        let link = json!({"command": "link", "arguments": "NIC up | loss N", "does": "y"});
        assert_eq!(
            render("help", &json!({"commands": [link]})),
            "link NIC up\n     … loss N\n    y\n"
        );
        assert_eq!(
            render("refusals", &json!({"refusals": []})),
            "nothing was refused\n"
        );
        assert_eq!(render("anything", &json!(null)), "");
    }
}
