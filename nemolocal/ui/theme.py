"""The look that gradio's own components take: colours, type and shapes. What they cannot say is in
assets/style.css, which uses the same names."""

from __future__ import annotations

import gradio as gr

GREEN = gr.themes.Color(
    name="nemo_green",
    c50="#f5fbe7",
    c100="#e8f6c9",
    c200="#d2ed98",
    c300="#b4df5b",
    c400="#97cd2b",
    c500="#76b900",
    c600="#5e9400",
    c700="#487100",
    c800="#3b5a06",
    c900="#324c0b",
    c950="#182a02",
)
# A grey with a trace of the green, so that the two sit together.
GREY = gr.themes.Color(
    name="nemo_grey",
    c50="#fafbf9",
    c100="#f3f5f1",
    c200="#e6e9e3",
    c300="#d1d6cd",
    c400="#9ba297",
    c500="#6d746a",
    c600="#4f564d",
    c700="#3a403a",
    c800="#242925",
    c900="#191d1a",
    c950="#111412",
)

SANS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "Helvetica Neue", "sans-serif"]
MONO = ["ui-monospace", "SFMono-Regular", "Cascadia Mono", "Consolas", "DejaVu Sans Mono", "monospace"]


def theme() -> gr.themes.Base:
    """Green on calm greys, in the system's own typefaces: nothing is fetched."""
    return gr.themes.Base(
        primary_hue=GREEN,
        secondary_hue=GREEN,
        neutral_hue=GREY,
        radius_size=gr.themes.sizes.radius_lg,
        text_size=gr.themes.sizes.text_md,
        font=[gr.themes.Font(name) for name in SANS],
        font_mono=[gr.themes.Font(name) for name in MONO],
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        body_text_color="#1d211c",
        body_text_color_dark="#e7eae4",
        body_text_color_subdued="*neutral_500",
        body_text_color_subdued_dark="*neutral_400",
        background_fill_primary="#ffffff",
        background_fill_primary_dark="*neutral_900",
        background_fill_secondary="*neutral_100",
        background_fill_secondary_dark="*neutral_800",
        border_color_primary="*neutral_200",
        border_color_primary_dark="#2c322d",
        border_color_accent="*primary_500",
        color_accent="*primary_500",
        color_accent_soft="*primary_50",
        color_accent_soft_dark="#20290f",
        link_text_color="*primary_700",
        link_text_color_hover="*primary_600",
        link_text_color_dark="*primary_300",
        link_text_color_hover_dark="*primary_200",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_shadow="none",
        block_label_text_color="*body_text_color",
        block_title_text_color="*body_text_color",
        block_title_text_size="*text_sm",
        block_title_text_weight="550",
        block_info_text_size="*text_xs",
        block_info_text_color="*body_text_color_subdued",
        input_background_fill="#ffffff",
        input_background_fill_dark="*neutral_900",
        input_border_width="1px",
        input_border_color="*neutral_300",
        input_border_color_dark="#363d37",
        input_border_color_focus="*primary_500",
        input_border_color_focus_dark="*primary_500",
        input_shadow="none",
        input_shadow_focus="0 0 0 3px color-mix(in srgb, *primary_500 22%, transparent)",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
        button_border_width="1px",
        button_primary_background_fill="*primary_500",
        button_primary_background_fill_hover="*primary_400",
        button_primary_text_color="#132000",
        button_primary_border_color="*primary_500",
        button_secondary_background_fill="transparent",
        button_secondary_background_fill_hover="*neutral_200",
        button_secondary_background_fill_dark="transparent",
        button_secondary_background_fill_hover_dark="*neutral_800",
        button_secondary_border_color="*neutral_300",
        button_secondary_border_color_dark="#363d37",
        button_secondary_text_color="*body_text_color",
        slider_color="*primary_500",
        slider_color_dark="*primary_500",
        code_background_fill="*neutral_100",
        code_background_fill_dark="#151916",
        chatbot_text_size="*text_lg",
    )
