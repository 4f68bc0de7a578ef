import Foundation
import XCTest

@testable import PictureMath

/// Compares with numbers that `intaglio`'s own runtime gave, in `golden.json`.
final class GoldenTests: XCTestCase {
    private struct Golden: Decodable {
        struct Sigmas: Decodable {
            let steps: Int
            let tokens: Int
            let shift: Float?
            let levels: [Float]
        }

        struct Normals: Decodable {
            let seed: UInt64
            let count: Int
            let values: [Float]
        }

        struct Grid: Decodable {
            let channels: Int
            let height: Int
            let width: Int
            let grid: [Float]
            let tokens: [Float]
            let ids: [Int32]
        }

        struct Step: Decodable {
            let latents: [Float]
            let velocity: [Float]
            let negative: [Float]
            let guidance: Float
            let sigma: Float
            let next: Float
            let guided: [Float]
            let after: [Float]
        }

        struct Pixels: Decodable {
            let sample: [Float]
            let bytes: [UInt8]
        }

        let sigmas: [Sigmas]
        let normals: [Normals]
        let grid: Grid
        let text: [Int32]
        let step: Step
        let pixels: Pixels
    }

    private func golden() throws -> Golden {
        let file = try XCTUnwrap(Bundle.module.url(forResource: "golden", withExtension: "json"))
        return try JSONDecoder().decode(Golden.self, from: Data(contentsOf: file))
    }

    func testSigmas() throws {
        for expected in try golden().sigmas {
            let found = FlowMatching.sigmas(steps: expected.steps, imageTokens: expected.tokens, shift: expected.shift)
            XCTAssertEqual(found.count, expected.levels.count)
            for (a, b) in zip(found, expected.levels) { XCTAssertEqual(a, b, accuracy: 1e-7) }
        }
    }

    func testNormals() throws {
        for expected in try golden().normals {
            let found = Noise.normals(count: expected.count, seed: expected.seed)
            XCTAssertEqual(found.count, expected.values.count)
            for (a, b) in zip(found, expected.values) { XCTAssertEqual(a, b, accuracy: 2e-6 * max(1, abs(b))) }
        }
    }

    func testGrid() throws {
        let expected = try golden().grid
        XCTAssertEqual(Latents.pack(expected.grid, channels: expected.channels), expected.tokens)
        XCTAssertEqual(Latents.unpack(expected.tokens, channels: expected.channels), expected.grid)
        XCTAssertEqual(Latents.imageIds(height: expected.height, width: expected.width), expected.ids)
        let text = try golden().text
        XCTAssertEqual(Latents.textIds(length: text.count / 4), text)
    }

    func testStep() throws {
        let expected = try golden().step
        let guided = FlowMatching.guided(expected.velocity, negative: expected.negative, guidance: expected.guidance)
        let after = FlowMatching.step(expected.latents, velocity: guided, sigma: expected.sigma, next: expected.next)
        for (a, b) in zip(guided, expected.guided) { XCTAssertEqual(a, b, accuracy: 1e-6 * max(1, abs(b))) }
        for (a, b) in zip(after, expected.after) { XCTAssertEqual(a, b, accuracy: 1e-6 * max(1, abs(b))) }
    }

    func testPixels() throws {
        let expected = try golden().pixels
        XCTAssertEqual(Latents.pixels(expected.sample), expected.bytes)
    }
}
