//! Pictures of clusters: no two texts overlap, whatever the cluster.

#![allow(clippy::unwrap_used)]

mod random;
mod testbeds;

use fusionllm_view::picture::Picture;

/// No two texts overlap, all are on the canvas, and each is at least 11 high.
fn check(picture: &Picture, case: &str) {
    let [width, height] = picture.size();
    assert!((width - 1280.0).abs() < 0.5 && height.is_finite(), "{case}: {width} x {height}");
    let mut texts: Vec<&([f64; 4], String)> = picture.texts().iter().collect();
    for ([x, y, w, h], text) in &texts {
        let inside = *x >= 0.0 && *y >= 0.0 && x + w <= width && y + h <= height;
        assert!(inside, "{case}: {text:?} at {x:.0}, {y:.0} leaves the canvas of {width:.0} x {height:.0}");
        assert!(*h >= 11.0, "{case}: {text:?} is too small");
    }
    texts.sort_by(|a, b| a.0[1].total_cmp(&b.0[1]));
    for (i, ([x1, y1, w1, h1], one)) in texts.iter().enumerate() {
        for ([x2, y2, w2, _], other) in texts[i + 1..].iter().take_while(|t| t.0[1] < y1 + h1) {
            let apart = x1 + w1 <= *x2 || x2 + w2 <= *x1;
            assert!(apart, "{case}: {one:?} at {x1:.0}, {y1:.0} overlaps {other:?} at {x2:.0}, {y2:.0}");
        }
    }
    let svg = picture.file();
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{case}: a number is not finite");
    for number in svg.split(['"', ' ']).filter_map(|n| n.parse::<f64>().ok()) {
        assert!((-1.0..20_000.0).contains(&number) || number.fract() == 0.0, "{case}: {number} is far out");
    }
}
