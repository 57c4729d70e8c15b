//! How a batch finds its rows, whatever Postgres believes of the table.

/// Joins each row of a batch with the place of the row in `$table` that has its
/// key: one look into the index, and then `WHERE q.ctid = place.ctid`. `OFFSET 0`
/// keeps it so. Only for rows that this transaction has locked: those stay put.
macro_rules! place {
    ($table:literal, $key:literal) => {
        concat!(
            " CROSS JOIN LATERAL (SELECT ctid FROM ",
            $table,
            " WHERE ",
            $key,
            " OFFSET 0) AS place "
        )
    };
}
