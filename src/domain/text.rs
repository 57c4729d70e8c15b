//! Enums that have one text each, from the column to the page.

/// Gives an enum its texts: `as_str`, `Display`, `FromStr`, and `ALL` for whoever
/// has to name every one of them.
macro_rules! text_form {
    ($type:ident { $($variant:ident => $text:literal),* $(,)? }) => {
        impl $type {
            /// Every variant, in the order of declaration.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The text used in Postgres, metrics, logs and on the wire.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),* }
            }
        }
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
        impl std::str::FromStr for $type {
            type Err = $crate::domain::UnknownText;
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $($text => Ok(Self::$variant),)*
                    _ => Err($crate::domain::UnknownText::new(stringify!($type), text)),
                }
            }
        }
    };
}

/// A text that this version does not know, perhaps because a newer one wrote it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this version does not know the {what} {text:?}")]
pub struct UnknownText {
    what: &'static str,
    text: String,
}

impl UnknownText {
    pub(crate) fn new(what: &'static str, text: &str) -> Self {
        Self {
            what,
            text: text.to_owned(),
        }
    }
}
